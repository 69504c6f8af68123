# SPDX-License-Identifier: Apache-2.0
"""What the adapters of one engine share: made once per worker and found by its config."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_bastion.carriers import StepPlan
from vllm_bastion.config import settings_of
from vllm_bastion.engine.deferred import DeferredContext
from vllm_bastion.engine.limits import make_trees
from vllm_bastion.policy.controller import Controller, Decision
from vllm_bastion.policy.cost.timing import StepTimer
from vllm_bastion.policy.reach import DraftReach
from vllm_bastion.policy.trees import Trees
from vllm_bastion.step import Step
from vllm_bastion.step_times import StepTimes
from vllm_bastion.telemetry.recorder import Recorder
from vllm_bastion.telemetry.seen_trees import SeenTrees

# Steps that the controller learns from at once. A forward pass evicts this code from a CPU's
# caches: on the tiny pair, learning took 17 us a step with four at once, and 30 us one by one.
_TOGETHER = 4


class DraftPlanner(Protocol):
    """The part of the verification manager that other adapters use."""

    @property
    def drafts(self) -> np.ndarray:
        """[R] int32, most nodes that each row of the step may have on the device."""

    @property
    def has_trees(self) -> bool:
        """See `BastionVerificationManager.has_trees`."""

    def continuing(
        self, batch: InputBatch, num_sampled: torch.Tensor | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """See `BastionVerificationManager.continuing`."""

    def plan(self, batch: InputBatch, context_len: float, spared: int) -> Decision:
        """See `BastionVerificationManager.plan`."""


@dataclass
class Runtime:
    """State of one worker's adapters. Made with the speculator, which vLLM builds first."""

    trees: Trees
    # None before calibration, and with a fixed budget.
    controller: Controller | None = None
    # Times the engine's steps; None if nothing learns from the times, or another rank measures.
    timer: StepTimer | None = None
    # Whether several ranks must decide alike. Then step times leave with a step's output, and all
    # ranks learn from them when they come back with a later step.
    learns_with_others: bool = False
    # Ascending sizes of the target's CUDA graphs; empty without graphs.
    graph_sizes: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    # None if every draft has the drafter's whole depth.
    reach: DraftReach | None = None
    # None until the first step, and if no row of the drafter's context may wait.
    deferred: DeferredContext | None = None
    # None until the KV cache exists.
    manager: DraftPlanner | None = None
    # None during warm-up and calibration.
    recorder: Recorder | None = None
    # [2, 3] of the step that was sampled last, see `Copies.count_sources`; its copy from the device
    # may be in flight. None without lookup.
    sources: np.ndarray | None = None
    # Trees that the page shows; None without it.
    seen: SeenTrees | None = None
    # Whether a draft is announced a step early: with async scheduling.
    announces_early: bool = False
    # The step that is being prepared, as the scheduler sent it (None outside `execute_model`, and
    # in a dummy run), and its record.
    scheduled: SchedulerOutput | None = None
    step: Step = field(default_factory=Step)
    # Positions of each block that a timed step leaves out; None except while steps are timed before
    # the first request. Each of their rows gets a distinct token, and attention reads the mask.
    timed_spares: int | None = None

    @property
    def plan(self) -> StepPlan:
        """Our scheduler's plan of the step; an empty one for steps before the first request."""
        return StepPlan.find(self.scheduled) or StepPlan()

    def learn(self) -> None:
        """Learn from the steps that have completed, unless all ranks must learn together."""
        controller = self.controller
        if controller is not None and not self.learns_with_others:
            controller.observe(self.completed_steps(at_once=controller.is_probing))

    def completed_steps(self, *, at_once: bool = False) -> list[StepTimes]:
        """Times not returned before; unless `at_once`, only once a few steps are pending."""
        timer = self.timer
        if timer is None or not (at_once or timer.num_pending >= _TOGETHER):
            return []
        return list(timer.completed())


def make_runtime(vllm_config: VllmConfig, device: torch.device) -> Runtime:
    """Allocate the trees of an engine and attach its runtime to the config."""
    config = settings_of(vllm_config)
    runtime = Runtime(make_trees(vllm_config, device))
    runtime.announces_early = bool(vllm_config.scheduler_config.async_scheduling)
    config.worker_runtime = runtime
    return runtime


def runtime_of(vllm_config: VllmConfig) -> Runtime:
    """The runtime that `make_runtime` attached to this engine's config."""
    runtime = settings_of(vllm_config).worker_runtime
    assert isinstance(runtime, Runtime)
    return runtime
