# SPDX-License-Identifier: Apache-2.0
"""Best-first expansion where the drafter's scores know the previous token.

A drafter with a head over its candidates scores transitions: log q_d(x | x'), from each of the M
candidates of a depth to each of the next one. A path score is the product along the path, as in
`best_first`, and every argument there still holds, because it needs only that a child does not beat
its parent: the frontier has one entry per node, the nodes come out in non-increasing rho, and every
prefix of them is the optimal prefix-closed tree of its size. Only the order of siblings differs: it
is that of the parent's own row.

Rows are not sorted in advance: a tree of N nodes reads at most N + 1 of the D * M rows. The next
best candidate of a row is two minima over its M columns. An entry of the
frontier holds a candidate and its rank among its siblings, a node its own candidate and the row of
its children. That row is the candidate's own, or the one that `rows` names: a head with a state
(`prefix_lattice`) has a row for each prefix that it kept. The independent lattice, one row for all
parents, stays with `best_first`: its rows are sorted, so the next child is a load and no search.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bastion_kernels.draft.best_first import Child, GrowsTrees, cost_of, expand_one, store_nodes
from bastion_kernels.op import public
from bastion_kernels.triton_or_none import tl, triton


def _ranked(logprobs: list[float], rows: list[int], tokens: list[int], ranks: int) -> list[Child]:
    """A row's best candidates in their order: log q, token, own row; NaN comes last."""
    order = sorted(
        range(len(tokens)),
        key=lambda i: -min(logprobs[i], 0.0) if logprobs[i] == logprobs[i] else float("inf"),
    )
    return [(logprobs[i], tokens[i], rows[i]) for i in order[:ranks]]


def _children_of_parent(levels: list[list[list[Child]]], depth: int, row: int) -> list[Child]:
    return levels[depth][row] if row >= 0 else []


@triton.jit
def _next(row_ptr, stride, size, after_cost, after, BLOCK_M: tl.constexpr):
    """Cost and candidate that follow (after_cost, after) in a row, +inf if none is left.

    size: candidates of the row, 0 for none. after_cost: int32, bits of a cost, which sort like it;
    -1 for the first of the row.
    """
    candidate = tl.arange(0, BLOCK_M)
    logprob = tl.load(row_ptr + candidate * stride, mask=candidate < size, other=float("-inf"))
    bits = cost_of(logprob).to(tl.int32, bitcast=True)
    later = (bits > after_cost) | ((bits == after_cost) & (candidate > after))
    none = tl.full([], float("inf"), tl.float32).to(tl.int32, bitcast=True)
    bits = tl.where(later, bits, none)
    least = tl.min(bits, 0)
    found = tl.min(tl.where(bits == least, candidate, BLOCK_M), 0)
    return least.to(tl.float32, bitcast=True), found


@triton.jit
def _expand_transitions_kernel(
    tokens_ptr,
    logprobs_ptr,
    rows_ptr,
    slots_ptr,
    out_tokens_ptr,
    parents_ptr,
    depths_ptr,
    log_rho_ptr,
    num_nodes_ptr,
    tokens_r,
    tokens_d,
    tokens_m,
    logprobs_r,
    logprobs_d,
    logprobs_p,
    logprobs_m,
    rows_r,
    rows_d,
    rows_p,
    rows_m,
    out_tokens_r,
    parents_s,
    depths_s,
    log_rho_s,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Grid: (R,). The frontier as in `best_first`, but for:

    entry [BLOCK] int32, node number << 16 | candidate of its next child << 8 | rank of that child
    above [BLOCK] int32, parent of the node
    own   [BLOCK] int32, depth of the node << 16 | row of its children, 255 for none << 8 | its
          candidate
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if slot >= 0:
        tokens_ptr += row * tokens_r
        logprobs_ptr += row * logprobs_r
        rows_ptr += row * rows_r
        none = tl.full([], float("inf"), tl.float32).to(tl.int32, bitcast=True)

        column = tl.arange(0, BLOCK)
        owner = (column + 1) % BLOCK
        first, candidate = _next(logprobs_ptr, logprobs_m, M, -1, -1, BLOCK_M)
        cost = tl.where(owner == 0, first, float("inf")).to(tl.int32, bitcast=True)
        entry = tl.where(owner == 0, candidate << 8, 0)
        score = tl.zeros([BLOCK], tl.float32)
        above = tl.zeros([BLOCK], tl.int32)
        own = tl.zeros([BLOCK], tl.int32)
        count = tl.full([], 0, tl.int32)
        best = tl.min(cost, 0)
        while (count < N) & (best < none):
            winner = tl.min(tl.where(cost == best, entry, 0x7FFFFFFF), 0)
            parent, candidate, rank = winner >> 16, (winner >> 8) & 0xFF, winner & 0xFF
            moved, opened = owner == parent, column == count
            parent_own = tl.sum(tl.where(moved, own, 0), 0)
            depth, parent_row = parent_own >> 16, (parent_own >> 8) & 0xFF
            # the winner's entry moves on to the next sibling, the new node opens its own
            row_ptr = logprobs_ptr + depth * logprobs_d + parent_row * logprobs_p
            taken = cost_of(tl.load(row_ptr + candidate * logprobs_m)).to(tl.int32, bitcast=True)
            size = tl.where(rank + 1 < TOP_K, M, 0)
            sibling_cost, sibling = _next(row_ptr, logprobs_m, size, taken, candidate, BLOCK_M)
            own_row = candidate
            if HAS_ROWS:
                own_row_ptr = rows_ptr + depth * rows_d + parent_row * rows_p + candidate * rows_m
                own_row = tl.load(own_row_ptr) & 0xFF  # -1 becomes 255
            row_ptr = logprobs_ptr + (depth + 1) * logprobs_d + own_row * logprobs_p
            size = tl.where((depth + 1 < D) & (own_row < 255), M, 0)
            child_cost, child = _next(row_ptr, logprobs_m, size, -1, -1, BLOCK_M)
            new = best.to(tl.float32, bitcast=True)
            count += 1
            entry = tl.where(moved, (parent << 16) | (sibling << 8) | (rank + 1), entry)
            entry = tl.where(opened, (count << 16) | (child << 8), entry)
            cost = tl.where(moved, (score + sibling_cost).to(tl.int32, bitcast=True), cost)
            cost = tl.where(opened, (new + child_cost).to(tl.int32, bitcast=True), cost)
            score = tl.where(opened, new, score)
            above = tl.where(opened, parent, above)
            own = tl.where(opened, ((depth + 1) << 16) | (own_row << 8) | candidate, own)
            best = tl.min(cost, 0)

        used, real = column < count, column < N
        depth, candidate = own >> 16, own & 0xFF
        token_ptr = tokens_ptr + (depth - 1) * tokens_d + candidate * tokens_m
        token = tl.load(token_ptr, mask=used, other=0).to(tl.int64)
        tl.store(out_tokens_ptr + row * out_tokens_r + column, token, mask=real)
        tl.store(parents_ptr + slot * parents_s + column, tl.where(used, above, -1), mask=real)
        tl.store(depths_ptr + slot * depths_s + column, tl.where(used, depth, 0), mask=real)
        score = tl.where(used, 0.0 - score, float("-inf"))
        tl.store(log_rho_ptr + slot * log_rho_s + column, score, mask=real)
        tl.store(num_nodes_ptr + slot, count)


@dataclass(slots=True)
class ExpandTransitions(GrowsTrees):
    """Write the first N nodes of every request's best-first tree over transition scores.

    The outputs are those of `expand_best_first`, and so is the tree where all rows of a depth are
    equal. A node's children are the candidates of the next depth by their log-probability in the
    node's row, at most `top_k` of them, ties to the lower candidate; those of -inf or NaN are left
    out. A candidate's own row is the one of its number, or with `rows` the one that they name.

    Raises:
        ValueError, TypeError: shapes, strides or dtypes do not fit together, or sizes beyond what
            an entry of the frontier can hold (N 4096, D, P and M 255).
    """

    candidates: Tensor
    """`[R, D, M]` int32, tokens of each depth."""
    logprobs: Tensor
    """`[R, D, P, M]` fp32, log q of candidate [.., m] in row [.., p, ..]; without `rows` P = M, and
    row p is that of candidate p of the depth above. At the first depth only row 0 is read, the
    root's. A value above 0 is read as 0."""
    top_k: int
    """Most children of a node; 1 gives a chain of min(D, N) nodes."""
    slots: Tensor
    """`[R]` int64, request slot of each row, or -1."""
    out_tokens: Tensor
    """`[R, N]` int64, written."""
    parents: Tensor
    """`[S, N]` int32, node number of the parent, written."""
    depths: Tensor
    """`[S, N]` int32, 1..D, written."""
    log_rho: Tensor
    """`[S, N]` fp32, path scores, written."""
    num_nodes: Tensor
    """`[S]` int32, columns in use, written."""
    rows: Tensor | None = None
    """`[R, D, P, M]` int32, at the next depth, the row of the children of candidate [.., m] after
    row [.., p, ..]; -1 for a candidate whose children are not known."""

    def check(self) -> None:
        reqs, depth, width = self.candidates.shape
        self.expect("candidates", (reqs, depth, width), torch.int32, strided=True)
        shape = (reqs, depth, width if self.rows is None else None, width)
        self.expect("logprobs", shape, torch.float32, strided=True)
        prefixes = self.logprobs.shape[2]
        if self.rows is not None:
            self.expect("rows", (reqs, depth, prefixes, width), torch.int32, strided=True)
        self.check_trees(reqs)
        if max(depth, width, prefixes) > 255 or self.top_k < 1:
            raise ValueError(
                f"{self.name}: D, P and M <= 255, top_k >= 1, got {depth}, {prefixes}, {width}, "
                f"{self.top_k}"
            )

    def reference(self) -> None:
        """Algorithm 1 over sorted rows."""
        for r, slot in enumerate(self.slots.tolist()):
            if slot < 0:
                continue
            own = torch.arange(self.candidates.shape[2]).expand_as(self.logprobs[r])
            own = own if self.rows is None else self.rows[r]
            levels = [
                [_ranked(*pair, tokens, self.top_k) for pair in zip(scores, rows, strict=True)]
                for scores, rows, tokens in zip(
                    self.logprobs[r].tolist(),
                    own.tolist(),
                    self.candidates[r].tolist(),
                    strict=True,
                )
            ]
            levels.append([[]] * max(self.logprobs.shape[2:]))
            nodes = expand_one(partial(_children_of_parent, levels), self.out_tokens.shape[1])
            rows = (self.out_tokens[r], self.parents[slot], self.depths[slot], self.log_rho[slot])
            store_nodes(nodes, self.num_nodes[slot], *rows)

    def triton(self) -> None:
        """One warp per request, one node per round."""
        reqs, depth, width = self.candidates.shape
        limit = self.out_tokens.shape[1]
        if reqs == 0:
            return
        has_rows = self.rows is not None
        rows = self.candidates if self.rows is None else self.rows
        _expand_transitions_kernel[(reqs,)](
            self.candidates,
            self.logprobs,
            rows,
            self.slots,
            self.out_tokens,
            self.parents,
            self.depths,
            self.log_rho,
            self.num_nodes,
            *self.candidates.stride(),
            *self.logprobs.stride(),
            *(rows.stride() if has_rows else (0, 0, 0, 0)),
            self.out_tokens.stride(0),
            self.parents.stride(0),
            self.depths.stride(0),
            self.log_rho.stride(0),
            D=depth,
            M=width,
            N=limit,
            TOP_K=self.top_k,
            HAS_ROWS=has_rows,
            BLOCK=max(32, triton.next_power_of_2(limit)),
            BLOCK_M=triton.next_power_of_2(width),
            num_warps=1,
        )


expand_transitions = public(ExpandTransitions, cpu="bastion_kernels.cpu.draft")
