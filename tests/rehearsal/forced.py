# SPDX-License-Identifier: Apache-2.0
"""Steps of a chosen kind, with launches that do nothing.

Nothing is emulated, so the device computes no tokens and no scores. Each step verifies as many
nodes and emits as many tokens as it would on average: these counts are written into the memory that
the driver calls the device's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from vllm_bastion.scheduler.gate import Arm

NODES, EMITTED = 16, 4
KINDS = (Arm.TREE, Arm.NGRAM, Arm.PLAIN)


class Steps:
    """Every step ends with `kind`, where the engine has that arm."""

    def __init__(self, kind: Arm = Arm.TREE) -> None:
        self.kind = kind

    def install(self) -> None:
        """From now on, in this process."""
        self._emit()
        self._decide()
        self._size()

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
            _write(found[1], counts)
            return found

        GPUModelRunner.sample = sampled

    def _decide(self) -> None:
        from vllm_bastion.scheduler.gate import Gate

        choose = Gate.choose

        def chosen(gate: Any, num_reqs: int) -> Arm:
            choose(gate, num_reqs)  # its time is part of a step
            return self.kind if self.kind in gate.arms else gate.arms[-1]

        Gate.choose = chosen

    def _size(self) -> None:
        """A step verifies `NODES` nodes a request."""
        from vllm_bastion.engine.budget import TreeBudgetManager, in_order

        choose, reallocate = TreeBudgetManager._choose, TreeBudgetManager.reallocate_drafts

        def chosen(manager: Any, most: int, width: int) -> np.ndarray:
            choose(manager, most, width)
            return in_order(most, np.minimum(manager._limits, NODES))

        def reallocated(manager: Any, *given: Any) -> Any:
            counts = manager._num_logits_np  # the host's
            found = reallocate(manager, *given)
            _write(found[0], counts.tolist())
            manager._num_logits_np = counts
            return found

        TreeBudgetManager._choose = chosen
        TreeBudgetManager.reallocate_drafts = reallocated


def _write(tensor: Any, numbers: Sequence[int]) -> None:
    """Write int32 numbers to the begin of a tensor."""
    (ctypes.c_int32 * len(numbers)).from_address(tensor.data_ptr())[:] = numbers
