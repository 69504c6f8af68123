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
        from vllm_bastion.policy.controller import Controller, Decision
        from vllm_bastion.policy.step_size import StepSize

        from vllm_bastion.policy.trees import Trees

        def decided(controller: Any, batch: Any, costs: Any) -> Decision:
            plain_ms = weigh(controller, batch, costs).plain_ms
            drafts, copies = self.kind == "drafts", self.kind == "copies"
            return Decision(drafts, "by plan", plain_ms, looks_up=copies and controller.looks_up)

        def nodes(size: Any, active: int, reqs: int, rows: int, most: int, *costs: Any) -> int:
            choose(size, active, reqs, rows, most, *costs)  # its time is part of a step
            return min(NODES * active, most)

        def published(trees: Any, step: int) -> Any:
            found = read(trees, step)
            if found is not None:
                found.num_verify[:], found.promised[:], found.emitted[:] = (
                    NODES,
                    EMITTED - 1,
                    EMITTED,
                )
            return found

        weigh, choose, read = Controller._weigh, StepSize.choose, Trees.published
        Controller._weigh, StepSize.choose, Trees.published = decided, nodes, published
