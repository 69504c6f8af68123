# SPDX-License-Identifier: Apache-2.0
"""Whether the coming draft is made at all, from what the last trees were worth."""

from __future__ import annotations

import numpy as np
import torch

from vllm_bastion.cost.gate import DraftGate
from vllm_bastion.cost.next_step import StepCosts
from vllm_bastion.step.host import HostMirror
from vllm_bastion.step.trees import Trees


class DraftSwitch:
    """Feeds a ``DraftGate`` with the steps of the engine and asks it before each draft.

    Requests are named by their slots. Every tensor-parallel rank decides for itself and from the
    same numbers: the scores are those of the gathered logits, and the cost table is rank 0's.
    """

    def __init__(self, costs: StepCosts, trees: Trees) -> None:
        self._gate = DraftGate()
        self._costs, self._trees = costs, trees
        self._emitted = HostMirror(torch.zeros_like(trees.num_verify))
        # Of the step whose emitted tokens were published last: rows with a tree, and its promise.
        self._rows = np.zeros(0, dtype=np.int64)
        self._promised = 0.0
        self._published = False

    def add_request(self, slot: int) -> None:
        """A new request, or a preempted one that comes back, takes the slot."""
        self._gate.forget(slot)

    def verifying(
        self, slots: np.ndarray, drafted: np.ndarray, nodes: np.ndarray, promised: np.ndarray
    ) -> None:
        """A step is about to verify trees.

        slots: [R]; drafted: [R] bool, rows that have a tree; nodes: [R] how many of it are
        verified, 0 also where it was not worth its first; promised: [R] sums of their scores.
        """
        if self._published:
            accepted = self._emitted.wait()[self._rows] - 1
            self._gate.realised(self._promised, float(accepted.sum()))
        rows = np.flatnonzero(drafted)
        self._gate.promised(slots[rows].tolist(), promised[rows], nodes[rows])
        self._rows, self._promised = rows, float(promised[rows].sum())
        self._published = False

    def emitted(self, num_sampled: torch.Tensor) -> None:
        """The step's acceptance is queued: num_sampled, [R], will hold its tokens."""
        if not len(self._rows):
            return
        count = num_sampled.shape[0]
        self._emitted.before_write()
        self._emitted.source[:count].copy_(num_sampled)
        self._emitted.start_copy()
        self._published = True

    def draft_next(self, slots: np.ndarray, context_len: float) -> bool:
        """Whether to draft for the coming step of the requests in `slots`, [R]."""
        plain_ms = self._costs.plain_ms(len(slots), context_len)
        return self._gate.draft(slots.tolist(), self._trees.cost_ms_host, plain_ms)
