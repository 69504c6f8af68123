# SPDX-License-Identifier: Apache-2.0
"""Best-first expansion of per-position candidates: the N best nodes of every request.

A node is a prefix of candidates, one per depth; its path score is

    log rho = sum_{i <= d} log q_i(x_i | x_{i-1})          (paper, section 3.1)

and best-first expansion adds the open node of largest rho, N times (Algorithm 1). A child's score
never exceeds its parent's, so nodes are added by non-increasing rho, and every prefix of them is
the optimal prefix-closed tree of its size (paper, optimality of best-first expansion).

DFlash has one row of scores for all nodes of a depth: q does not depend on x_{i-1}. DFlash2,
LiLiCorr and DSpark have a row for each candidate of the depth above.

An n-gram draft may be a branch of the same tree, see `mix_ngram`. Its nodes have their own rows.

The frontier has one entry per node of the tree: the node's best child that has not been taken.
Taking it adds a node, with its own entry, and advances the entry to the next sibling. Ties go to
the lower parent number, and sums are rounded to fp32 from the root down, so all implementations
compute the same tree. A single row of a depth is sorted: the next sibling is one load. M rows are
not, because a tree of N nodes reads at most N + 1 of the D * M; the next sibling is searched among
the M candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bastion_kernels.checks import check
from bastion_kernels.draft.best_first_kernel import expand_kernel
from bastion_kernels.draft.candidates import ReadsCandidates
from bastion_kernels.op import public
from bastion_kernels.triton_or_none import triton


@dataclass(frozen=True)
class NgramRows:
    """Output of `mix_ngram`, and the source of each node. L depths, at least D."""

    tokens: Tensor
    """`[R, L]` int32, the n-gram draft."""
    places: Tensor
    """`[R, L]` int32, its index among the candidates, M where it is none of them, -1 without."""
    rows: Tensor
    """`[R, L, M + 1]` fp32, log q' of a node on it."""
    sources: Tensor
    """`[S, N]` int32, written: 1 for a node of the drafter alone, 2 of the n-gram draft alone, 3 of
    both, 0 for an unused column."""


@dataclass(slots=True)
class ExpandBestFirst(ReadsCandidates):
    """Write the first N nodes of every request's best-first tree, in non-increasing rho.

    Draft node j is column j and node number j + 1; number 0 is the root. Row r's tokens go to row r
    of `out_tokens`, the rest to row `slots[r]`; a row with `slots[r] == -1` writes nothing. Unused
    columns get token 0, parent -1, depth 0, log rho -inf. A node's children are the candidates of
    the next depth by their log-probability in the node's row, at most `top_k` of them, ties to the
    lower candidate. Candidates of -inf or NaN are excluded; with P = 1, so are those ranked after
    them.

    Raises:
        ValueError, TypeError: shapes, strides or dtypes do not fit together, or sizes exceed the
            fields of a frontier entry (N 4096; D and M 255).
    """

    candidates: Tensor
    """`[R, D, M]` int32, tokens of each depth."""
    logprobs: Tensor
    """`[R, D, P, M]` fp32, log q of candidate [.., m] in row [.., p, ..]. At the first depth only
    row 0 is read, the root's. A value above 0 is read as 0. With P = 1, candidates must be in
    order, best first. With P = M, row p is that of candidate p of the depth above."""
    top_k: int
    """Most children of a node; 1 gives a chain of min(D, N) nodes."""
    slots: Tensor
    """`[R]` int64, request slot of each row, or -1."""
    out_tokens: Tensor
    """`[R, N]` int64, written."""
    parents: Tensor
    """`[S, N]` int32, node number of the parent, written."""
    depths: Tensor
    """`[S, N]` int32, 1..L, written."""
    log_rho: Tensor
    """`[S, N]` fp32, path scores, written."""
    num_nodes: Tensor
    """`[S]` int32, columns in use, written."""
    ngram: NgramRows | None = None
    """N-gram drafts that may become branches of these trees; None: none."""

    def check(self) -> None:
        reqs, depth, width = self.candidates.shape
        num_slots, limit = self.parents.shape
        self.check_candidates()
        self.expect("slots", (reqs,), torch.int64)
        self.expect("out_tokens", (reqs, limit), torch.int64)
        self.expect("parents", (num_slots, limit), torch.int32)
        self.expect("depths", (num_slots, limit), torch.int32)
        self.expect("log_rho", (num_slots, limit), torch.float32)
        self.expect("num_nodes", (num_slots,), torch.int32)
        if self.ngram is not None:
            length, kind = self.ngram.tokens.shape[1], torch.int32
            for name, shape, dtype in (
                ("tokens", (reqs, length), kind),
                ("places", (reqs, length), kind),
                ("rows", (reqs, length, width + 1), torch.float32),
                ("sources", (num_slots, limit), kind),
            ):
                check(self.name, f"ngram.{name}", getattr(self.ngram, name), shape, dtype)
            if not depth <= length <= 254:
                raise ValueError(f"{self.name}: D <= L <= 254, got {depth}, {length}")
        if limit > 4096 or max(depth, width) > 255 or self.top_k < 1:
            raise ValueError(
                f"{self.name}: N <= 4096, D and M <= 255, top_k >= 1, got {limit}, {depth}, "
                f"{width}, {self.top_k}"
            )

    def triton(self) -> None:
        """One warp per request, one node per round."""
        reqs, _, width = self.candidates.shape
        limit = self.out_tokens.shape[1]
        if reqs == 0:
            return
        ngram = self.ngram
        expand_kernel[(reqs,)](
            **self.candidate_arguments(),
            slots=self.slots,
            out_tokens=self.out_tokens,
            parents=self.parents,
            depths=self.depths,
            log_rho=self.log_rho,
            num_nodes=self.num_nodes,
            ngram_tokens=None if ngram is None else ngram.tokens,
            places=None if ngram is None else ngram.places,
            ngram_rows=None if ngram is None else ngram.rows,
            sources=None if ngram is None else ngram.sources,
            stride_ngram_tokens_r=0 if ngram is None else ngram.tokens.stride(0),
            stride_ngram_rows_r=0 if ngram is None else ngram.rows.stride(0),
            stride_sources_s=0 if ngram is None else ngram.sources.stride(0),
            stride_out_tokens_r=self.out_tokens.stride(0),
            stride_parents_s=self.parents.stride(0),
            stride_depths_s=self.depths.stride(0),
            stride_log_rho_s=self.log_rho.stride(0),
            N=limit,
            TOP_K=min(self.top_k, width if ngram is None else width + 1),
            IN_ORDER=self.stateless and ngram is None,
            L=0 if ngram is None else ngram.tokens.shape[1],
            BLOCK=max(32, triton.next_power_of_2(limit)),
            BLOCK_M=triton.next_power_of_2(width if ngram is None else width + 1),
            num_warps=1,
        )


expand_best_first = public(ExpandBestFirst, cpu="bastion_kernels.cpu.draft")
