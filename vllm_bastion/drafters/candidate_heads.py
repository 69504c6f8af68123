# SPDX-License-Identifier: Apache-2.0
"""vLLM's drafters with a head over their candidates, proposing a tree.

The head scores every candidate of a position given every candidate of the position before. vLLM's
own speculator follows one candidate at each position, from the anchor. A tree uses all scores: the
softmax over a row gives each child's probability given its parent.
"""

from __future__ import annotations

import torch
from vllm.v1.worker.gpu.spec_decode.dflash2.speculator import DFlash2Speculator
from vllm.v1.worker.gpu.spec_decode.lilicorr.speculator import LiLiCorrSpeculator

from vllm_bastion.drafters.capacity import by_parts
from vllm_bastion.drafters.dflash import BastionSpeculator


class BastionDFlash2(BastionSpeculator, DFlash2Speculator):
    """DFlash2's low-rank candidate selector."""

    def _grow_trees(self, hidden_states: torch.Tensor, num_reqs: int) -> None:
        rank = self.model.compute_candidates
        candidates, logits = by_parts(rank, hidden_states, num_reqs)
        block = num_reqs, self.num_speculative_steps, -1
        candidates = candidates.view(block)
        scores = self._score_candidates(candidates, logits.view(block), hidden_states.view(block))
        self.trees.grow_transitions(candidates, scores)


class BastionLiLiCorr(BastionDFlash2, LiLiCorrSpeculator):
    """LiLiCorr's attention over the per-position candidates."""

    # It also reads the last context row of each request.
    _inputs_in_graph = False
