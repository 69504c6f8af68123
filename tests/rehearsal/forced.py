# SPDX-License-Identifier: Apache-2.0
"""Steps of a chosen kind, with launches that do nothing.

Nothing is emulated, so the device computes no tokens and no scores. Each step emits as many tokens
as it would on average: the count is written into the memory that the driver calls the device's.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

NODES, EMITTED = 16, 4
KINDS = ("drafts", "copies", "plain")


class Steps:
    """Every step ends with a draft, with copies alone, or with neither, as `kind` says."""

    def __init__(self, kind: str = "drafts") -> None:
        self.kind = kind

    def install(self) -> None:
        """From now on, in this process."""
        self._emit()
        self._decide()

    def _emit(self) -> None:
        """Each request emits `EMITTED` tokens, or as many as it has drafts and one more."""
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner

        sample = GPUModelRunner.sample

        def sampled(runner: Any, hidden: Any, batch: Any, grammar: Any) -> Any:
            found = sample(runner, hidden, batch, grammar)
            drafts = batch.num_draft_tokens_per_req
            counts = (
                [1] * batch.num_reqs if drafts is None else np.minimum(1 + drafts, EMITTED).tolist()
            )
            numbers = (ctypes.c_int32 * batch.num_reqs).from_address(found[1].data_ptr())
            numbers[:] = counts
            return found

        GPUModelRunner.sample = sampled

    def _decide(self) -> None:
        from vllm_bastion.engine.budget import TreeBudgetManager
        from vllm_bastion.scheduler.gate import Arm, Gate

        arm = {"drafts": Arm.TREE, "copies": Arm.NGRAM, "plain": Arm.PLAIN}[self.kind]
        choose, size = Gate.choose, TreeBudgetManager._choose

        def chosen(gate: Gate, num_reqs: int) -> Arm:
            choose(gate, num_reqs)  # its time is part of a step
            return arm

        def nodes(manager: TreeBudgetManager, most: int) -> np.ndarray:
            size(manager, most)
            return np.minimum(manager._limits, NODES).astype(np.int32)

        Gate.choose, TreeBudgetManager._choose = chosen, nodes
