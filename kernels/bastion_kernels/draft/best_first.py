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
Taking it adds a node, with its own entry, and advances the entry to the next sibling: one load from
a single row, which is sorted; a search among the M candidates of M rows. Ties go to the lower
parent number, and sums are rounded to fp32 from the root down, so all implementations compute the
same tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from bastion_kernels.draft.best_first_kernel import expand_kernel
from bastion_kernels.op import Op, padded, public


class ReadsCandidates(Op):
    """An op with `logprobs` `[R, D, P, M]`; P is 1, or M: a row for each candidate above."""

    __slots__ = ()
    logprobs: Tensor

    def check(self) -> None:
        self.check_declared()
        rows, width = self.logprobs.shape[2:]
        if rows not in (1, width):
            raise ValueError(f"{self.name}: P is 1 or M = {width}, got {rows}")

    @property
    def stateless(self) -> bool:
        """Whether all nodes of a depth off the n-gram draft share one row."""
        return self.logprobs.shape[2] == 1

    @property
    def stride_of_rows(self) -> int:
        """From the row of one candidate to that of the next."""
        return 0 if self.stateless else self.logprobs.stride(2)


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
            fields of a frontier entry (N 4096; D 254, M 255).
    """

    candidates: Annotated[Tensor, "[R, D, M] int32, strided"]  # tokens of each depth
    # log q of candidate [.., m] in row [.., p, ..]. At the first depth only row 0 is read, the
    # root's. A value above 0 is read as 0. With P = 1, candidates must be in order, best first.
    # With P = M, row p is that of candidate p of the depth above.
    logprobs: Annotated[Tensor, "[R, D, P, M] float32, strided"]
    top_k: int  # most children of a node; 1 gives a chain of min(D, N) nodes
    slots: Annotated[Tensor, "[R] int64"]  # request slot of each row, or -1
    out_tokens: Annotated[Tensor, "[R, N] int64"]  # written
    parents: Annotated[Tensor, "[S, N] int32"]  # written: node number of the parent
    depths: Annotated[Tensor, "[S, N] int32"]  # written: 1..L
    log_rho: Annotated[Tensor, "[S, N] float32"]  # written: path scores
    num_nodes: Annotated[Tensor, "[S] int32"]  # written: columns in use
    # Drafts that may become branches of these trees, of L depths, at least D. All four or none.
    ngram_tokens: Annotated[Tensor | None, "[R, L] int32"] = None
    # Index of the draft's token among the candidates, M where it is none of them, -1 without.
    places: Annotated[Tensor | None, "[R, L] int32"] = None
    # log q' of a node on the draft.
    ngram_rows: Annotated[Tensor | None, "[R, L, M + 1] float32"] = None
    # Written: 1 for a node of the drafter alone, 2 of the n-gram draft alone, 3 of both, 0 for an
    # unused column.
    sources: Annotated[Tensor | None, "[S, N] int32"] = None

    def check(self) -> None:
        ReadsCandidates.check(self)
        (depth, width), limit = self.candidates.shape[1:], self.parents.shape[1]
        length = depth if self.ngram_tokens is None else self.ngram_tokens.shape[1]
        if not max(depth, 1) <= length <= 254:  # the kernel reads the first row
            raise ValueError(f"{self.name}: 1, D <= L <= 254, got {depth}, {length}")
        if limit > 4096 or width > 255 or self.top_k < 1:
            raise ValueError(
                f"{self.name}: N <= 4096, M <= 255, top_k >= 1, got {limit}, {width}, {self.top_k}"
            )

    def triton(self) -> None:
        """One warp per request, one node per round."""
        width = self.candidates.shape[2] + (self.ngram_tokens is not None)
        self.launch(
            expand_kernel,
            self.candidates.shape[0],
            stride_logprobs_p=self.stride_of_rows,
            TOP_K=min(self.top_k, width),
            IN_ORDER=self.stateless and self.ngram_tokens is None,
            BLOCK=padded(self.parents.shape[1], 32),
            BLOCK_M=padded(width),
            num_warps=1,
        )


expand_best_first = public(ExpandBestFirst, cpu="bastion_kernels.cpu.draft")
