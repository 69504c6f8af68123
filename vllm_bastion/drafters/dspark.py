# SPDX-License-Identifier: Apache-2.0
"""vLLM's DSpark drafter, proposing a tree.

DSpark drafts its block as DFlash does. A low-rank Markov head adds a bias to a position's logits
that depends on the token before. vLLM's own speculator draws one token after the other. A tree
takes the best M unbiased tokens of every position, as that speculator does with
`dspark_draft_topk` = M, and the bias of each given each token of the position before.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator

from vllm_bastion.checkpoints.drafter_types import candidates_of
from vllm_bastion.drafters.capacity import by_parts
from vllm_bastion.drafters.dflash import BastionSpeculator


class BastionDSpark(BastionSpeculator, DSparkSpeculator):
    """Serves both layouts of the block: with a query for the anchor only, and without."""

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
        count = candidates_of(self.draft_model_config.hf_config)
        assert count is not None

        def best(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return torch.topk(model.compute_draft_logits(rows), count)

        values, draft_ids = by_parts(best, hidden_states, num_reqs)  # [R * D, M]
        candidates = model.map_draft_to_target(draft_ids).view(num_reqs, depth, count)
        anchors = self.input_buffers.input_ids[self._anchor_idx[:num_reqs]]
        before = torch.empty_like(candidates)
        before[:, 0] = anchors[:, None]
        before[:, 1:] = candidates[:, :-1]
        embeds = model.markov_embed(before.flatten(0, 1))  # [R * D, M, rank]
        weight = model.model.markov_head.markov_w2.weight[draft_ids]
        # As in vLLM's speculator, the sum is rounded once, to the logits' dtype.
        scores = torch.baddbmm(
            values[:, None], embeds, weight.mT, alpha=model.logits_processor.scale
        )
        self.trees.grow_transitions(candidates, scores.view(num_reqs, depth, count, count))
