# SPDX-License-Identifier: Apache-2.0
"""A Domino drafter, proposing a tree; vLLM itself does not have it.

Domino drafts its block as DFlash does. Its head carries a state along the branch: a GRU reads the
tokens of the block so far, anchor first, and corrects the logits of the position after them. The
published runtimes follow one chain. A tree takes the best M uncorrected tokens of every position
and corrects them after each of the best `WIDTH` prefixes of the depth above; see
`bastion_kernels.draft.prefix_lattice`. A chain, which is one prefix, corrects as many as the op
takes.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from bastion_kernels import PrefixLattice, recurrent_lattice, topk_logprobs
from vllm_bastion.checkpoints.kinds import candidates_of
from vllm_bastion.checkpoints.rules import MOST_CANDIDATES
from vllm_bastion.drafters.dflash import BastionSpeculator
from vllm_bastion.drafters.room import parts

# Prefixes kept at a depth, for each request of a batch of any size: a tree is grown before its
# budget is known. More gained nothing on the tiny pair.
WIDTH = 16


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
        self._kept: tuple[torch.Tensor, torch.Tensor, PrefixLattice] | None = None

    def load_draft_model(self, *args: Any, **kwargs: Any) -> nn.Module:
        model: Any = super().load_draft_model(*args, **kwargs)
        self._head = model.prefix_head()
        self._prepared = model.prepared_head()
        return cast(nn.Module, model)

    def _grow_trees(self, hidden_states: torch.Tensor, num_reqs: int) -> None:
        model, depth = self.model, self.num_speculative_steps
        for first, rows in parts(hidden_states, num_reqs):
            logits = model.logits_processor(model.lm_head, rows)
            if self._kept is None:  # in vLLM's profiling run, so that its memory is counted
                self._kept = self._buffers(logits.shape[-1])
            count = self._kept[0].shape[2]
            best = (part.view(-1, count)[first : first + len(rows)] for part in self._kept[:2])
            topk_logprobs(logits, count, *best)
            del logits  # before the next part's logits are computed
        assert self._kept is not None
        ids, base, lattice = self._kept
        ids, base, lattice = ids[:num_reqs], base[:num_reqs], lattice.of(num_reqs)
        tokens = model.map_draft_to_target(ids)
        recurrent_lattice(
            self._head,
            self._prepared,
            model.embed_input_ids,
            self.input_buffers.input_ids[self._anchor_rows[:num_reqs]],
            tokens,
            ids,
            base,
            hidden_states.view(num_reqs, depth, -1),
            self.trees.top_k,
            lattice,
        )
        longest = self.runtime.step.longest_copy
        self.trees.grow_lattice(tokens, lattice.logprobs, lattice.rows, longest)

    def _buffers(self, vocab: int) -> tuple[torch.Tensor, torch.Tensor, PrefixLattice]:
        """Candidates, their uncorrected scores and the lattice, for the largest batch."""
        chains, reqs, depth = self.trees.chains, self.max_num_reqs, self.num_speculative_steps
        count = candidates_of(self.draft_model_config.hf_config)
        assert count is not None
        if chains:
            count = min(MOST_CANDIDATES, vocab)
        width = 1 if chains else min(WIDTH, self.trees.tree_size)
        ids = torch.empty(reqs, depth, count, dtype=torch.int32, device=self.device)
        base = torch.empty(ids.shape, dtype=torch.float32, device=self.device)
        return ids, base, PrefixLattice.empty(reqs, depth, width, count, self.device)
