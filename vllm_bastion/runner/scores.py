# SPDX-License-Identifier: Apache-2.0
"""``bastion_path_scores: "calibrated"``: the drafter's probabilities corrected by what came true.

``PathScoreCorrection`` learns on the host; this file brings it what it learns from, one step late
and without a wait, and keeps its coefficients in buffers that the drafter's graph reads.
"""

from __future__ import annotations

import numpy as np
import torch

from vllm_bastion.path_scores import PathScoreCorrection, correct_logprobs
from vllm_bastion.runner.host import HostMirror, copy_to_device

_UNSEEN = -2  # no target token at this depth


class ScoreLearner:
    """S slots, D depths, K candidates; see the module."""

    def __init__(self, max_num_reqs: int, depth: int, top_k: int, device: torch.device) -> None:
        self._correction = PathScoreCorrection(depth, top_k)
        # One row more than slots: what inert rows of a batch write to.
        shape = (max_num_reqs + 1, depth, top_k)
        self._tokens = torch.full(shape, -1, dtype=torch.int32, device=device)
        self._logprobs = torch.zeros(shape, device=device)
        self._slope = torch.ones(depth, top_k, device=device)
        self._bias = torch.zeros(depth, top_k, device=device)
        self._ranks = HostMirror(
            torch.full((max_num_reqs, depth), _UNSEEN, dtype=torch.int32, device=device)
        )
        self._seen = HostMirror(torch.zeros(max_num_reqs, depth, top_k, device=device))
        self._reqs = 0
        self._depths = torch.arange(1, depth + 1, dtype=torch.int32, device=device)

    def drafted(self, tokens: torch.Tensor, logprobs: torch.Tensor, slots: torch.Tensor) -> None:
        """Remember a draft and correct its scores in place. Captured with the drafter.

        tokens, logprobs: [R, D, K]; slots: [R], -1 for inert rows.
        """
        rows = torch.where(slots < 0, self._tokens.shape[0] - 1, slots)
        self._tokens[rows] = tokens
        self._logprobs[rows] = logprobs
        logprobs.copy_(correct_logprobs(logprobs, self._slope, self._bias))

    def verified(
        self,
        sampled: torch.Tensor,
        num_sampled: torch.Tensor,
        slots: torch.Tensor,
        masked: torch.Tensor,
    ) -> None:
        """A step's trees were verified: publish where the target's tokens stood in the drafts.

        sampled: [R, D + 1] emitted tokens; num_sampled: [R]; slots: [R]; masked: [R] non-zero where
        the request had a tree (a spine is a fallback and teaches nothing).
        """
        count, depth = slots.shape[0], self._depths.shape[0]
        hits = self._tokens[slots] == sampled[:, :depth, None]
        self._ranks.before_write()
        self._seen.before_write()
        ranks = torch.where(hits.any(-1), hits.to(torch.int32).argmax(-1).to(torch.int32), -1)
        known = (self._depths <= num_sampled[:, None]) & (masked > 0)[:, None]
        self._ranks.source[:count] = ranks.masked_fill(~known, _UNSEEN)
        self._seen.source[:count] = self._logprobs[slots]
        self._ranks.start_copy()
        self._seen.start_copy()
        self._reqs = count

    def learn(self) -> None:
        """Take in the step published last, and install the coefficients if they changed."""
        if not self._reqs:
            return
        ranks, logprobs = self._ranks.wait(), self._seen.wait()
        changed = False
        for row in range(self._reqs):
            known = int(np.argmin(np.append(ranks[row] != _UNSEEN, False)))
            changed |= self._correction.observe(logprobs[row], ranks[row, :known])
        self._reqs = 0
        if changed:
            copy_to_device(self._correction.slope, self._slope)
            copy_to_device(self._correction.bias, self._bias)
