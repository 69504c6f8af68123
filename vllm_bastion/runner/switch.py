# SPDX-License-Identifier: Apache-2.0
"""Whether the coming draft is made at all, from what the last trees were worth."""

from __future__ import annotations

import numpy as np
import torch

from vllm_bastion.controller import Budget
from vllm_bastion.modes import ModeSelector
from vllm_bastion.runner.costs import StepCosts
from vllm_bastion.runner.host import HostMirror
from vllm_bastion.runner.trees import Trees


class DraftSwitch:
    """Feeds a ``ModeSelector`` with the steps of the engine and asks it before each draft.

    Every tensor-parallel rank decides for itself and from the same numbers: the scores are those of
    the gathered logits, and the cost table is rank 0's.
    """

    def __init__(self, costs: StepCosts, trees: Trees) -> None:
        self._selector = ModeSelector()
        self._costs, self._trees = costs, trees
        self._emitted = HostMirror(torch.zeros_like(trees.num_verify))
        self._budget: Budget | None = None
        # Of the step whose emitted tokens were published last.
        self._reqs = 0

    def verifying(self, log_rho: np.ndarray, kept: np.ndarray, rest: np.ndarray) -> None:
        """A step verifies the first `kept` nodes of its rows.

        log_rho: [R, N] of the rows' trees; kept: [R]; rest: [R] rows that are no nodes.
        """
        if self._budget is not None and self._reqs:
            tokens = int(self._emitted.wait()[: self._reqs].sum())
            self._selector.observe(self._budget, self._reqs, tokens)
        width = int(kept.max(initial=0))
        nodes = np.arange(width) < kept[:, None]
        rho = np.exp(log_rho[:, :width], where=nodes, out=np.zeros(nodes.shape, np.float32))
        rows = int(rest.sum() + kept.sum())
        # A step that also computes prompts says nothing about trees.
        decodes = bool((rest == 1).all()) and width > 0
        self._budget = (
            Budget(kept, float(len(kept) + rho.sum()), float(self._trees.cost_ms_host[rows]))
            if decodes
            else None
        )
        self._reqs = 0

    def emitted(self, num_sampled: torch.Tensor) -> None:
        """The step's acceptance is queued: num_sampled, [R], will hold its tokens."""
        self._reqs = num_sampled.shape[0]
        self._emitted.before_write()
        self._emitted.source[: self._reqs].copy_(num_sampled)
        self._emitted.start_copy()

    def draft_next(self, num_reqs: int, context_len: float) -> bool:
        """Whether to draft for the coming step."""
        plain_ms = self._costs.plain_ms(num_reqs, context_len)
        return self._selector.next_mode(num_reqs, plain_ms, tree=self._budget) != "plain"
