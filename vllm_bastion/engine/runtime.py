# SPDX-License-Identifier: Apache-2.0
"""What the adapters of one engine share: made once per worker and found by its config."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import ReferenceType

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, ModelCudaGraphManager

from vllm_bastion.attached import StepPlan
from vllm_bastion.config import settings_of
from vllm_bastion.engine.context import DraftContext
from vllm_bastion.engine.limits import make_trees
from vllm_bastion.policy.trees import Trees
from vllm_bastion.step import Step


@dataclass
class Runtime:
    """State of one worker's adapters. Made with the speculator, which vLLM builds first."""

    trees: Trees
    # The speculator's.
    context: DraftContext | None = None
    # The `TreeBudgetManager`; None until the KV cache exists.
    manager: Any = None
    # The target's graphs, which own the hidden states of their steps. vLLM must be able to drop
    # those of its memory profile.
    target_graphs: ReferenceType[ModelCudaGraphManager] | None = None
    # Picks the graph that moves the accepted rows of a step and prepares its draft, and the one of
    # the current step; None if there is none.
    choose_draft_graph: Callable[[Step], BatchExecutionDescriptor | None] | None = None
    draft_graph: BatchExecutionDescriptor | None = None
    # Whether steps are recorded: not during warm-up, nor with VLLM_BASTION_TELEMETRY=0.
    records: bool = False
    # [R, 2, 3] nodes and accepted tokens of the step that was sampled last, by source (see
    # `accept_path`). Their copy from the device may be in flight. None without lookup.
    sources: np.ndarray | None = None
    # The step that is being prepared, as the scheduler sent it (None outside `execute_model`, and
    # in a dummy run), and its record.
    scheduled: SchedulerOutput | None = None
    step: Step = field(default_factory=Step)
    # What our scheduler planned for it, until it is sampled; the default before the first request.
    plan: StepPlan = field(default_factory=StepPlan)
    # Whether a dummy step runs as a step of trees, in warm-up and the profile. Its rows are not
    # padding, and attention reads the mask.
    profiles: bool = False


def make_runtime(vllm_config: VllmConfig, device: torch.device) -> Runtime:
    """Allocate the trees of an engine and attach its runtime to the config."""
    runtime = Runtime(make_trees(vllm_config, device))
    settings_of(vllm_config).worker_runtime = runtime
    return runtime


def runtime_of(vllm_config: VllmConfig) -> Runtime:
    """The runtime that `make_runtime` attached to this engine's config."""
    runtime = settings_of(vllm_config).worker_runtime
    assert isinstance(runtime, Runtime)
    return runtime
