# SPDX-License-Identifier: Apache-2.0
"""A Domino drafter, proposing a tree; vLLM itself does not have it.

Domino drafts its block as DFlash does. Its head carries a state along the branch: a GRU reads the
tokens of the block so far, anchor first, and corrects the logits of the position after them. The
published runtimes follow one chain. A tree takes the best M uncorrected tokens of every position
and corrects them after each of the best `_WIDTH` prefixes of the depth above; see
`bastion_kernels.draft.frontier`. A chain, which is one prefix, corrects as many as the op takes.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from bastion_kernels import recurrent_lattice, topk_logprobs
from vllm_bastion.drafter_kinds import CHAIN_CANDIDATES, candidates_of
from vllm_bastion.drafters.dflash import BastionSpeculator

# Prefixes kept at a depth. More gained nothing; see benchmarks/results/domino.md.
_WIDTH = 16


class BastionDomino(BastionSpeculator):
    """Serves both layouts of the block: with a prediction at the anchor's query, and without."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = self.draft_model_config.hf_config.dflash_config
        self.sample_from_anchor = bool(settings["shift_label"])
        depth = self.num_speculative_steps
        self.num_query_per_req = depth if self.sample_from_anchor else 1 + depth
        first = torch.arange(self.max_num_reqs, dtype=torch.int64, device=self.device)
        self._anchor_rows = first * self.num_query_per_req

    def load_draft_model(self, *args: Any, **kwargs: Any) -> nn.Module:
        model: Any = super().load_draft_model(*args, **kwargs)
        self._head = model.prefix_head()
        self._prepared = self._head.prepared()
        return cast(nn.Module, model)

    def _grow_trees(self, hidden_states: torch.Tensor, num_reqs: int) -> None:
        model, depth, chains = self.model, self.num_speculative_steps, self.trees.chains
        logits = model.logits_processor(model.lm_head, hidden_states)
        count = candidates_of(self.draft_model_config.hf_config)
        assert count is not None
        if chains:
            count = min(CHAIN_CANDIDATES, logits.shape[-1])
        ids = torch.empty(len(logits), count, dtype=torch.int32, device=logits.device)
        base = torch.empty(ids.shape, dtype=torch.float32, device=logits.device)
        topk_logprobs(logits, count, ids, base)
        shape = num_reqs, depth, count
        tokens = model.map_draft_to_target(ids).view(shape)
        lattice = recurrent_lattice(
            self._head,
            self._prepared,
            model.embed_input_ids,
            self.input_buffers.input_ids[self._anchor_rows[:num_reqs]],
            tokens,
            ids.view(shape),
            base.view(shape),
            hidden_states.view(num_reqs, depth, -1),
            1 if chains else min(_WIDTH, self.trees.tree_size),
            self.trees.top_k,
        )
        self.trees.grow_lattice(tokens, lattice.logprobs, lattice.rows)
