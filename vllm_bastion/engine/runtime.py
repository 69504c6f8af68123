# SPDX-License-Identifier: Apache-2.0
"""What the adapters of one engine share, found from the engine's config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from vllm.config import VllmConfig

from vllm_bastion.config import bastion_config
from vllm_bastion.policy.cost.timing import StepTimer
from vllm_bastion.policy.gate import DraftGate
from vllm_bastion.policy.step_costs import StepCosts
from vllm_bastion.policy.trees import Trees

_ATTRIBUTE = "_bastion_runtime"


class DraftPlanner(Protocol):
    """What the other adapters ask the verification manager."""

    @property
    def drafts(self) -> np.ndarray:
        """[R] int32, most nodes that each row of the step may have on the device."""

    def draft_next(self, slots: np.ndarray, context_len: float) -> bool:
        """Whether the coming step of the requests in `slots`, [R], gets trees."""


@dataclass
class Runtime:
    """One per worker, made with the speculator, the first of the adapters to be built."""

    trees: Trees
    # None until the engine was measured, and where the budget is a fixed number.
    costs: StepCosts | None = None
    # None where every step drafts: a fixed budget, or data parallelism.
    gate: DraftGate | None = None
    # None until the KV cache exists.
    manager: DraftPlanner | None = None
    # Whether the last ``propose`` grew trees.
    drafted: bool = True
    # Whether steps that are scheduled from here on get placeholders.
    drafting: bool = True

    @property
    def timer(self) -> StepTimer | None:
        """Times the engine's steps; None where nobody learns from them."""
        return self.costs.timer if self.costs is not None else None


def make_runtime(vllm_config: VllmConfig, device: torch.device) -> Runtime:
    """Allocate the trees of an engine."""
    config = bastion_config(vllm_config)
    assert config is not None
    budget = config.bastion_budget
    max_num_reqs = vllm_config.scheduler_config.max_num_seqs
    trees = Trees(
        max_num_reqs=max_num_reqs,
        max_num_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        num_nodes=config.num_speculative_tokens,
        depth=config.bastion_gamma,
        top_k=config.bastion_top_k,
        budget=None if budget == "adaptive" else int(budget),
        device=device,
    )
    runtime = Runtime(trees)
    # On the config object itself: it is the one thing every builder is given, and it lives as
    # long as the engine. Set only in the worker, after the config crossed process borders.
    object.__setattr__(config, _ATTRIBUTE, runtime)
    return runtime


def runtime_of(vllm_config: VllmConfig) -> Runtime:
    """The runtime `make_runtime` made for this engine."""
    runtime: Runtime = getattr(vllm_config.speculative_config, _ATTRIBUTE)
    return runtime
