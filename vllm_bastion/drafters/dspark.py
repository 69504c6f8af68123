# SPDX-License-Identifier: Apache-2.0
"""vLLM's DSpark drafter, proposing a tree.

DSpark drafts its block as DFlash does and adds to the logits of a position a bias that the token
before it has (a Markov head of low rank). vLLM's own speculator draws one token after the other.
A tree takes the best M tokens of every position before any bias, as that speculator does where
`dspark_draft_topk` is M, and the bias of each of them after each of those before it.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator

from vllm_bastion.drafter_kinds import candidates_of
from vllm_bastion.drafters.dflash import BastionSpeculator


class BastionDSpark(BastionSpeculator, DSparkSpeculator):
    """Both layouts of the block: with a query for the anchor alone, and without."""

    _speculator_name = "BASTION"

    def load_draft_model(self, *args: Any, **kwargs: Any) -> nn.Module:
        model: Any = super().load_draft_model(*args, **kwargs)
        head = model.model.markov_head
        if head.markov_w2.weight.dtype != head.markov_w1.weight.dtype:
            raise ValueError(
                f'the Markov head of drafter "{self.draft_model_config.model}" is quantised, which '
                'method "bastion" cannot gather candidates from: use an unquantised checkpoint'
            )
        return cast(nn.Module, model)

    def _grow_trees(self, hidden_states: torch.Tensor, num_reqs: int) -> None:
        model, depth = self.model, self.num_speculative_steps
        logits = model.compute_draft_logits(hidden_states)
        count = candidates_of(self.draft_model_config.hf_config)
        assert count is not None
        values, draft_ids = logits.topk(count, dim=-1)  # [R * D, M]
        candidates = model.map_draft_to_target(draft_ids).view(num_reqs, depth, count)
        anchors = self.input_buffers.input_ids[self._anchor_idx[:num_reqs]]
        before = torch.empty_like(candidates)
        before[:, 0] = anchors[:, None]
        before[:, 1:] = candidates[:, :-1]
        embeds = model.markov_embed(before.flatten(0, 1))  # [R * D, M, rank]
        weight = model.model.markov_head.markov_w2.weight[draft_ids]
        # As vLLM's own: the sum is rounded once, to the logits' type.
        scores = torch.baddbmm(
            values[:, None], embeds, weight.mT, alpha=model.logits_processor.scale
        )
        self.trees.grow_transitions(candidates, scores.view(num_reqs, depth, count, count))
