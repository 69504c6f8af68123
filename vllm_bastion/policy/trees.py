# SPDX-License-Identifier: Apache-2.0
"""The draft trees of all requests, in buffers that live as long as the engine.

Sizes: R requests of a batch, S request slots (vLLM's ``max_num_reqs``), N nodes of a tree without
its root, D drafted depth (gamma), K candidates per depth, V vocabulary, L depth of a tree: D, or
more where n-gram drafts may go on, see `NgramDrafts`.

The drafter writes a tree at the end of step t (``grow_candidates``), the target verifies it in step
t+1, and then it is overwritten. Node 0 is the root, the bonus token; the node of column j is node
j + 1. Columns are in order of non-increasing path score, so any prefix of the columns is a tree,
and trimming a tree to the budget means dropping its last columns.

Per-request state is indexed by request slot (vLLM's ``idx_mapping``), because the batch of step t+1
may have other requests than the batch of step t.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from bastion_kernels import (
    ancestor_bits,
    bind_slots,
    expand_best_first,
    gather_rows,
    topk_logprobs,
    tree_positions,
)
from vllm_bastion.policy.ngram import NgramDrafts


class Trees:
    """Trees by request slot, and which rows of the current step are trees.

    Args:
        max_num_reqs: S.
        max_num_tokens: most rows of one step (vLLM's ``max_num_batched_tokens``).
        num_nodes: N, vLLM's ``num_speculative_tokens``.
        depth: D, the drafter's gamma.
        top_k: K.
        budget: nodes verified of each request, or None if N* is chosen in each step.
        device: where the target runs.
        ngram_depth: most tokens of an n-gram draft.
    """

    def __init__(
        self,
        *,
        max_num_reqs: int,
        max_num_tokens: int,
        num_nodes: int,
        depth: int,
        top_k: int,
        budget: int | None,
        device: torch.device,
        ngram_depth: int = 0,
    ) -> None:
        self.num_nodes, self.gamma = num_nodes, depth
        depth = self.depth = max(depth, ngram_depth)
        # None without n-gram lookup.
        self.ngram: NgramDrafts | None = None
        self.budget, self.device = budget, device
        slots = max_num_reqs

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        # Of the drafter's batch, by row of the batch.
        self.row_slots = torch.full((slots,), -1, dtype=torch.int64, device=device)  # [R]
        self.tokens = zeros(slots, num_nodes, dtype=torch.int64)
        # By request slot.
        self.parents = torch.full((slots, num_nodes), -1, dtype=torch.int32, device=device)
        self.depths = zeros(slots, num_nodes)
        self.log_rho = torch.full((slots, num_nodes), -torch.inf, device=device)
        # [S, N] `log_rho` by row of the drafter's batch, for the host; None if it reads none.
        self.row_scores: torch.Tensor | None = None
        self.size = zeros(slots)  # nodes of the tree
        # On the host: each request's own limit on its nodes.
        self.node_limits_host = np.full(slots, num_nodes, dtype=np.int32)
        self.bits = zeros(slots, num_nodes + 1, (num_nodes + 32) // 32)
        # [S] tokens of each request's n-gram draft that are expected to be accepted.
        self.ngram_expected = torch.zeros(slots, device=device)
        # By row of the current step's batch (padding: slot -1, tail 0). A tail is a root and nodes.
        self.step_slots = torch.full((slots,), -1, dtype=torch.int64, device=device)
        self.tail_lens = zeros(slots)
        self.positions = zeros(max_num_tokens, dtype=torch.int64)
        self.path = torch.full((slots, depth + 1), -1, dtype=torch.int32, device=device)
        self._bind_draft = bind_slots.bind(slots=self.row_slots)
        self._bind_step = bind_slots.bind(slots=self.step_slots, tail_lens=self.tail_lens)

        self._set_top_k(top_k)

    def look_up(self, history: torch.Tensor, lengths: torch.Tensor, num_kept: int = 0) -> None:
        """Add n-gram drafts to the trees, see `NgramDrafts`."""
        limits = self.depth, self.num_nodes, len(self.positions), num_kept
        self.ngram = NgramDrafts(history, lengths, *limits)

    def use_chains(self) -> None:
        """Draft chains only. Must be called before the first forward pass, dummy or captured."""
        self._set_top_k(1)

    def _set_top_k(self, top_k: int) -> None:
        self.top_k = top_k
        # A chain's rows are causal and need no mask; its accepted rows are in place.
        self.chains = top_k == 1
        # Less than N only if the candidates have fewer paths.
        depth = self.gamma if self.chains else self.depth
        self.tree_size = min(self.num_nodes, sum(top_k**d for d in range(1, depth + 1)))
        shape = (len(self.row_slots), self.gamma, top_k)
        self.top_tokens = torch.zeros(shape, dtype=torch.int32, device=self.device)
        self.top_logprobs = torch.zeros(shape, device=self.device)

    # ---- end of step t: the drafter's logits become trees -------------------------------

    def bind_rows(self, idx_mapping: torch.Tensor | None = None) -> None:
        """Set the request slots that the next ``grow_candidates`` writes to; none for a dummy run.

        idx_mapping: [R] int64 request slots.
        """
        self._bind_draft(self.row_slots[:0] if idx_mapping is None else idx_mapping)

    def rank(
        self,
        logits: torch.Tensor,
        first: int,
        vocab_start: int = 0,
        all_gather: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """Keep the K best tokens of some rows of a draft. Runs inside the drafter's captured graph.

        Args:
            logits: [M, V] of the drafter, those of a request consecutive. With `all_gather`, V is
                this rank's slice of the vocabulary.
            first: which of the draft's R * D rows is the first.
            vocab_start: first token id of the slice.
            all_gather: [M, 1, X] fp32 of this rank -> [M, ranks, X] of all ranks.
        """
        rows = slice(first, first + len(logits))
        best = (
            self.top_tokens.view(-1, self.top_k)[rows], self.top_logprobs.view(-1, self.top_k)[rows]
        )  # fmt: skip
        topk_logprobs(logits, self.top_k, *best)
        if all_gather is not None:
            _merge_slices(logits, vocab_start, *best, all_gather)

    def grow_ranked(
        self, num_reqs: int, depth: int, draft_id_to_target_id: torch.Tensor | None = None
    ) -> None:
        """Build the trees of a batch after `rank` has ranked `depth` rows of each request.

        Args:
            draft_id_to_target_id: [drafter's V] int64, if the drafter's vocabulary is a subset of
                the target's: the offset from a draft token id to the target's ("d2t").
        """
        tokens, logprobs = (
            top.view(-1, self.top_k)[: num_reqs * depth].view(num_reqs, depth, self.top_k)
            for top in (self.top_tokens, self.top_logprobs)
        )
        if draft_id_to_target_id is not None:
            tokens += draft_id_to_target_id[tokens.long()].to(torch.int32)
        self.grow_candidates(tokens, logprobs[:, :, None])

    def grow_transitions(self, candidates: torch.Tensor, scores: torch.Tensor) -> None:
        """Build the trees of a batch from transition scores. Runs inside the drafter's graph.

        Args:
            candidates: [R, D, M] integer tokens of each depth, M >= K.
            scores: [R, D, M, M] scores of each candidate (last axis) given each candidate of the
                previous depth, the root being row 0 at the first depth; the softmax of a row is the
                distribution that the parent's next token is drawn from.
        """
        logprobs = scores.float().log_softmax(-1)
        self.grow_candidates(candidates.to(torch.int32), logprobs)

    def grow_ngram(self, num_reqs: int) -> None:
        """Build the trees of a batch from n-gram drafts only: the drafter has no candidates."""
        self.grow_candidates(self.top_tokens[:num_reqs, :0], self.top_logprobs[:num_reqs, :0, None])

    def grow_candidates(self, tokens: torch.Tensor, logprobs: torch.Tensor) -> None:
        """Build a batch's trees from its candidates' log-probabilities, in the drafter's graph.

        Every type of drafter ends here.

        Args:
            tokens: [R, D, M] int32 candidates of each depth.
            logprobs: [R, D, P, M] fp32 of each candidate: P = 1, or P = M where they depend on the
                token above, row p after candidate p of the depth above.
        """
        reqs = len(tokens)
        slots = self.row_slots[:reqs]
        ngram: tuple[torch.Tensor, ...] = ()
        if self.ngram is not None:
            ngram = self.ngram.mix(slots, tokens, logprobs, self.ngram_expected)
        expand_best_first(
            tokens,
            logprobs,
            self.top_k,
            slots,
            self.tokens[:reqs],
            self.parents,
            self.depths,
            self.log_rho,
            self.size,
            *ngram,
        )
        ancestor_bits(self.parents, slots, self.bits)
        if self.row_scores is not None:
            gather_rows([self.log_rho], slots, [self.row_scores])

    # ---- step t+1: the trees are verified -----------------------------------------------

    def begin_step(
        self, idx_mapping: torch.Tensor | None = None, tails: torch.Tensor | None = None
    ) -> None:
        """Bind the target's batch: each request's slot, and how many of its rows are a tree.

        Args:
            idx_mapping: [R] int64 request slots; None for a dummy batch.
            tails: [R + 1] int32, vLLM's ``cu_num_logits``; None if every request has a chain or
                only its root, whose rows are causal and need no mask.
        """
        if idx_mapping is None:
            idx_mapping = self.step_slots[:0]
        self._bind_step(idx_mapping, tails)

    def positions_by_depth(
        self, positions: torch.Tensor, query_start_loc: torch.Tensor
    ) -> torch.Tensor:
        """Positions of the step's rows: a node's is its root's plus the node's depth.

        Reads the batch of `begin_step`, so a graph may capture it.

        Args:
            positions: [T] int64, vLLM's, which count the rows of a request.
            query_start_loc: [R + 1] int32 first row of each request.

        Returns:
            [T] int64, a view of the buffer that the sampler reads.
        """
        out, num_reqs = self.positions[: positions.shape[0]], query_start_loc.shape[0] - 1
        slots, tails = self.step_slots[:num_reqs], self.tail_lens[:num_reqs]
        tree_positions(positions, self.depths, slots, query_start_loc, tails, out)
        return out


def _merge_slices(
    logits: torch.Tensor,
    vocab_start: int,
    tokens: torch.Tensor,
    logprobs: torch.Tensor,
    all_gather: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Turn the best [M, K] of this rank's slice of the vocabulary into the best of all slices.

    The same on every rank, ties included: all compute it from the same numbers.
    """
    # log sum exp of the slice, from its best logit; a slice without a finite logit has none
    mass = logits.gather(1, tokens[:, :1].long()).float() - logprobs[:, :1]
    ids = (tokens + vocab_start).view(torch.float32)
    sent = all_gather(torch.cat([logprobs + mass, mass, ids], 1)[:, None])
    scores, ids = sent[..., : -ids.shape[1]], sent[..., -ids.shape[1] :].flatten(1)
    scores = scores.where(~scores.isnan(), -torch.inf)
    best = scores[..., :-1].flatten(1).topk(tokens.shape[1], dim=1)
    tokens.copy_(ids.view(torch.int32).gather(1, best.indices))
    logprobs.copy_(best.values - scores[..., -1].logsumexp(1, keepdim=True))
