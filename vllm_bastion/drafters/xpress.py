# SPDX-License-Identifier: Apache-2.0
"""vLLM's XPress drafter, proposing a tree; vLLM 0.33 has it.

XPress drafts its block as DFlash does. Its head adds a bias to a position's logits that depends on
all tokens of the block before it, mixed by position and then by an MLP. vLLM's own speculator finds
the greedy block by iterating over all positions at once. A tree starts from the same block. It
scores a node's children as if the node's ancestors were the tokens of that block: exact where the
node's parent lies on the block, approximate elsewhere.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.v1.worker.gpu.spec_decode.xpress.speculator import XPressSpeculator

from vllm_bastion.checkpoints.kinds import candidates_of
from vllm_bastion.drafters.dflash import BastionSpeculator
from vllm_bastion.drafters.room import by_parts

# Tokens of a position that are ranked if `xpress_topc` is not set: the vocabulary is too large.
_RANKED = 512


class BastionXPress(BastionSpeculator, XPressSpeculator):
    """The refiner's greedy block, and each candidate's effect on the next position."""

    _speculator_name = "BASTION"

    def load_draft_model(self, *args: Any, **kwargs: Any) -> nn.Module:
        model: Any = super().load_draft_model(*args, **kwargs)
        width = model.model.xpress_head.block_size
        if width != self.num_query_per_req:
            raise ValueError(
                f'the refiner of drafter "{self.draft_model_config.model}" is made for blocks of '
                f"{width} (xpress_block_size), and its block_size is {self.num_query_per_req}: use "
                "a complete checkpoint"
            )
        return cast(nn.Module, model)

    def _of_block(self, hidden_states: Tensor, num_reqs: int) -> Tensor:
        return hidden_states[: num_reqs * self.num_query_per_req]  # the anchor's as well

    def _grow_trees(self, hidden_states: Tensor, num_reqs: int) -> None:
        head = self.model.model.xpress_head
        block = hidden_states.view(num_reqs, self.num_query_per_req, -1)

        def ranked(block: Tensor) -> tuple[Tensor, ...]:
            logits = self.model.compute_draft_logits(block)
            return logits.topk(min(head.topc or _RANKED, logits.shape[-1]), dim=-1)

        base, candidates = by_parts(ranked, block[:, 1:], num_reqs)  # [R, D, C]
        anchors = self.input_buffers.input_ids[self._anchor_idx[:num_reqs]]
        refiner = Refiner(head, block, head.w2.weight[candidates])

        # vLLM's Jacobi iteration: all positions at once, until most blocks have converged.
        before = torch.empty(block.shape[:2], dtype=torch.int64, device=anchors.device)
        before[:, :2] = anchors[:, None]
        before[:, 2:] = candidates[:, :-1, 0]
        for _ in range(self.num_jacobi_passes):
            best = (base + refiner.bias(before)).argmax(-1, keepdim=True)
            before[:, 2:] = candidates.gather(2, best)[:, :-1, 0]

        count = candidates_of(self.draft_model_config.hf_config)
        assert count is not None
        ranks = (base + refiner.bias(before)).topk(count, dim=-1).indices  # [R, D, M]
        candidates = candidates.gather(2, ranks)
        parents = before[:, 1:, None].repeat(1, 1, count)
        parents[:, 1:] = candidates[:, :-1]
        scores = base.gather(2, ranks)[:, :, None] + refiner.bias_after(before, parents, ranks)
        self.trees.grow_transitions(candidates, scores, self.runtime.step.longest_copy)


class Refiner:
    """XPress's head on the blocks of a batch. B = D + 1 positions, anchor first; r = rank.

    Args:
        head: vLLM's `XPressRefinerHead`.
        block: [R, B, H] hidden states.
        outputs: [R, D, C, r] the head's output weights of each candidate.
    """

    def __init__(self, head: Any, block: Tensor, outputs: Tensor) -> None:
        self.head, self.outputs = head, outputs
        inputs = 2 * head.rank
        weight = head.in_proj.weight
        self._of_token = weight[:, inputs:]
        self._hidden = F.linear(head.hidden_cache(block), weight[:, :inputs])
        mixer = head.mix_L.to(block.dtype)
        self._mixer, self._own = mixer, mixer.diagonal(dim1=1, dim2=2).mT[1:]  # [r, B, B], [D, r]

    def _inputs(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        return hidden + F.linear(self.head.w1(tokens), self._of_token)

    def _mixed(self, inputs: Tensor) -> Tensor:
        """[R, B, r] -> [R, B, r]: mix each position with those before it."""
        return torch.bmm(self._mixer, inputs.permute(2, 1, 0)).permute(2, 1, 0)

    def _latent(self, mixed: Tensor) -> Tensor:
        head = self.head
        return mixed + head.mlp_down(F.silu(head.mlp_gate(mixed)) * head.mlp_up(mixed))

    def bias(self, before: Tensor) -> Tensor:
        """Bias of every candidate, [R, D, C]; before: [R, B] token before each position."""
        latent = self._latent(self._mixed(self._inputs(before, self._hidden))[:, 1:])
        return (self.outputs @ latent[..., None])[..., 0]

    def bias_after(self, before: Tensor, parents: Tensor, ranks: Tensor) -> Tensor:
        """Bias of the candidates at `ranks` [R, D, M] after each parent, [R, D, M, M].

        parents: [R, D, M] tokens of the position before. Earlier tokens are those of `before`.
        """
        inputs = self._inputs(before, self._hidden)
        others = (self._mixed(inputs)[:, 1:] - self._own * inputs[:, 1:])[:, :, None]
        own = self._own[:, None] * self._inputs(parents, self._hidden[:, 1:, None])
        latent = self._latent(others + own)  # [R, D, M, r]
        outputs = self.outputs.gather(2, ranks[..., None].expand(-1, -1, -1, latent.shape[-1]))
        return latent @ outputs.mT
