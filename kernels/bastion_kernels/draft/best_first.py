# SPDX-License-Identifier: Apache-2.0
"""Best-first expansion of the drafter's top-K lattice into the N best nodes of every request.

A node is a prefix (k_1, .., k_d) of candidate ranks, one per depth; its path score is

    log rho = sum_{i <= d} log q_i(x_{k_i})            (paper, section 3.1)

and best-first expansion adds the open node of largest rho, N times (Algorithm 1). A child never
beats its parent, so the nodes come out in non-increasing rho and every prefix of them is the
optimal prefix-closed tree of its size (paper, optimality of best-first expansion).

The frontier needs one entry per node of the tree: the best child of that node that is not taken
yet. Taking it adds a node (with an entry of its own) and advances the entry to the next sibling.
Ties go to the lower parent number, and the sums are rounded to fp32 from the root down, so that
every implementation computes the same tree.

Why the kernel takes one node per round. Rounds can be saved by going depth by depth (the N best
prefixes of a depth are among the N best of the depth above, times K), but each of those D rounds
selects N out of some N ln N candidates: about 60 compare-exchange stages over 2,048 keys for
N = 256, shared-memory traffic in most of them, times D = 15. Here the frontier stays in the
registers of one warp and a round is two integer minima (one `redux.sync` each), two cached loads
and a few selects per 32 entries: compiled for sm_90, 65 / 138 / 230 instructions for N = 64 / 256 /
512, without a barrier or a store, and independent of K. N rounds of that are some 10,000 cycles at
N = 64 and 60,000 at N = 256 (latencies included, by count and not by measurement); the sorts would
be no faster, and far more code. Requests run side by side, one warp each.

Two things make the round short. Scores are stored as costs -log rho >= 0, whose fp32 bits sort like
integers, so the minimum is an integer one. Parent number, depth and rank of the winner are packed
into one integer, whose minimum among equal costs also breaks ties.
"""

from __future__ import annotations

import ctypes
import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bastion_kernels.op import Op, public
from bastion_kernels.triton_or_none import tl, triton

Child = tuple[float, int, int]  # log q, token, candidate
_Node = tuple[int, int, int, float]  # token, parent, depth, log rho
_UNUSED: _Node = (0, -1, 0, -math.inf)


def expand_one(children: Callable[[int, int], list[Child]], limit: int) -> list[_Node]:
    """The `limit` best nodes of one lattice, by a heap.

    children: from a parent's depth (the root's is 0) and its candidate to its possible children:
        log q, token and candidate, best first.
    """
    nodes: list[_Node] = [(0, -1, 0, 0.0)]  # the root, dropped at the end
    candidates = [0]  # of each node
    heap: list[tuple[float, int, int]] = []  # -log rho, parent, rank: ties to the lower parent

    def push(parent: int, rank: int) -> None:
        _, _, depth, log_rho = nodes[parent]
        row = children(depth, candidates[parent])
        if rank < len(row):
            cost = ctypes.c_float(-log_rho - min(row[rank][0], 0.0)).value
            if cost < math.inf:  # neither impossible nor NaN
                heapq.heappush(heap, (cost, parent, rank))

    push(0, 0)
    while heap and len(nodes) <= limit:
        cost, parent, rank = heapq.heappop(heap)
        depth = nodes[parent][2]
        _, token, candidate = children(depth, candidates[parent])[rank]
        nodes.append((token, parent, depth + 1, 0.0 - cost))
        candidates.append(candidate)
        push(len(nodes) - 1, 0)
        push(parent, rank + 1)
    return nodes[1:]


def store_nodes(nodes: list[_Node], num_nodes: Tensor, *rows: Tensor) -> None:
    """Write one request's tree: its size [], and tokens, parents, depths, log rho [N]."""
    num_nodes.fill_(len(nodes))
    columns = zip(*nodes, *[_UNUSED] * (len(rows[0]) - len(nodes)), strict=True)
    for row, column in zip(rows, columns, strict=True):
        row.copy_(torch.tensor(column, dtype=row.dtype))


def _children_at_depth(levels: list[list[Child]], depth: int, candidate: int) -> list[Child]:
    return levels[depth]


@triton.jit
def cost_of(logprob):
    """-logprob, at least +0.0; NaN becomes +inf, as if the candidate were impossible."""
    cost = tl.where(logprob < 0.0, 0.0 - logprob, 0.0)
    return tl.where(logprob == logprob, cost, float("inf"))


@triton.jit
def _expand_kernel(
    tokens_ptr,
    logprobs_ptr,
    slots_ptr,
    out_tokens_ptr,
    parents_ptr,
    depths_ptr,
    log_rho_ptr,
    num_nodes_ptr,
    tokens_r,
    tokens_d,
    tokens_k,
    logprobs_r,
    logprobs_d,
    logprobs_k,
    out_tokens_r,
    parents_s,
    depths_s,
    log_rho_s,
    D: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (R,). The frontier, in registers. Column i belongs to node i + 1, the last column also
    to the root: node BLOCK may overwrite it because the loop ends with that node.

    cost  [BLOCK] int32, bits of -log rho (fp32) of the node's next child; +inf if it has none left
    entry [BLOCK] int32, node number << 16 | its depth << 8 | rank of that child
    above [BLOCK] fp32, -log rho of the node itself
    taken [BLOCK] int32, the entry by which the node was added: parent, parent's depth, own rank
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if slot >= 0:
        tokens_ptr += row * tokens_r
        logprobs_ptr += row * logprobs_r
        none = tl.full([], float("inf"), tl.float32).to(tl.int32, bitcast=True)

        column = tl.arange(0, BLOCK)
        owner = (column + 1) % BLOCK
        first = cost_of(tl.load(logprobs_ptr))
        cost = tl.where(owner == 0, first, float("inf")).to(tl.int32, bitcast=True)
        entry = tl.zeros([BLOCK], tl.int32)
        above = tl.zeros([BLOCK], tl.float32)
        taken = tl.zeros([BLOCK], tl.int32)
        count = tl.full([], 0, tl.int32)
        best = tl.min(cost, 0)
        while (count < N) & (best < none):
            winner = tl.min(tl.where(cost == best, entry, 0x7FFFFFFF), 0)
            parent, depth, rank = winner >> 16, (winner >> 8) & 0xFF, winner & 0xFF
            score = best.to(tl.float32, bitcast=True)
            # the winner's entry moves on to the next sibling, the new node opens its own
            sibling_ptr = logprobs_ptr + depth * logprobs_d + (rank + 1) * logprobs_k
            sibling = tl.load(sibling_ptr, mask=rank + 1 < K, other=float("-inf"))
            child_ptr = logprobs_ptr + (depth + 1) * logprobs_d
            child = tl.load(child_ptr, mask=depth + 1 < D, other=float("-inf"))
            moved, opened = owner == parent, column == count
            count += 1
            entry = tl.where(moved, entry + 1, entry)
            entry = tl.where(opened, (count << 16) | ((depth + 1) << 8), entry)
            taken = tl.where(opened, winner, taken)
            cost = tl.where(moved, (above + cost_of(sibling)).to(tl.int32, bitcast=True), cost)
            cost = tl.where(opened, (score + cost_of(child)).to(tl.int32, bitcast=True), cost)
            above = tl.where(opened, score, above)
            best = tl.min(cost, 0)

        used, real = column < count, column < N
        parent, depth, rank = taken >> 16, (taken >> 8) & 0xFF, taken & 0xFF
        token = tl.load(tokens_ptr + depth * tokens_d + rank * tokens_k, mask=used, other=0)
        tl.store(out_tokens_ptr + row * out_tokens_r + column, token.to(tl.int64), mask=real)
        tl.store(parents_ptr + slot * parents_s + column, tl.where(used, parent, -1), mask=real)
        tl.store(depths_ptr + slot * depths_s + column, tl.where(used, depth + 1, 0), mask=real)
        score = tl.where(used, 0.0 - above, float("-inf"))
        tl.store(log_rho_ptr + slot * log_rho_s + column, score, mask=real)
        tl.store(num_nodes_ptr + slot, count)


class GrowsTrees(Op):
    """An op that writes trees; see `ExpandBestFirst`."""

    __slots__ = ()
    parents: Tensor

    def check_trees(self, reqs: int) -> None:
        """Raise unless the outputs fit `reqs` rows and the parents' shape."""
        num_slots, limit = self.parents.shape
        self.expect("slots", (reqs,), torch.int64)
        self.expect("out_tokens", (reqs, limit), torch.int64)
        self.expect("parents", (num_slots, limit), torch.int32)
        self.expect("depths", (num_slots, limit), torch.int32)
        self.expect("log_rho", (num_slots, limit), torch.float32)
        self.expect("num_nodes", (num_slots,), torch.int32)
        if limit > 4096:  # what an entry of a frontier can hold
            raise ValueError(f"{self.name}: N <= 4096, got {limit}")


@dataclass(slots=True)
class ExpandBestFirst(GrowsTrees):
    """Write the first N nodes of every request's best-first tree, in non-increasing rho.

    Draft node j is column j and node number j + 1; number 0 is the root. Row r's tokens go to row r
    of `out_tokens`, the rest to row `slots[r]`; a row with `slots[r] == -1` writes nothing. Unused
    columns get token 0, parent -1, depth 0, log rho -inf. A candidate of log-probability -inf or
    NaN, and the ones ranked after it, are left out.

    Raises:
        ValueError, TypeError: shapes, strides or dtypes do not fit together, or sizes beyond what
            an entry of the frontier can hold (N 4096, D and K 255).
    """

    topk_tokens: Tensor
    """`[R, D, K]` int32, candidates of each depth, best first; with K = 1 the tree is the chain of
    the best candidates, min(D, N) nodes."""
    topk_logprobs: Tensor
    """`[R, D, K]` fp32, their log-probabilities, non-increasing along K; a value above 0 is read as
    0."""
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

    def check(self) -> None:
        reqs, depth, width = self.topk_tokens.shape
        shape = (reqs, depth, width)
        self.expect("topk_tokens", shape, torch.int32, strided=True)
        self.expect("topk_logprobs", shape, torch.float32, strided=True)
        self.check_trees(reqs)
        if depth > 255 or width > 255:
            raise ValueError(f"{self.name}: D <= 255, K <= 255, got {depth}, {width}")

    def reference(self) -> None:
        """Algorithm 1 with a heap of first children and next siblings."""
        for r, slot in enumerate(self.slots.tolist()):
            if slot < 0:
                continue
            ranks = range(self.topk_tokens.shape[2])
            lists = zip(self.topk_logprobs[r].tolist(), self.topk_tokens[r].tolist(), strict=True)
            levels = [*([*zip(*both, ranks, strict=False)] for both in lists), []]
            nodes = expand_one(partial(_children_at_depth, levels), self.out_tokens.shape[1])
            rows = (self.out_tokens[r], self.parents[slot], self.depths[slot], self.log_rho[slot])
            store_nodes(nodes, self.num_nodes[slot], *rows)

    def triton(self) -> None:
        """One warp per request, one node per round."""
        reqs, depth, width = self.topk_tokens.shape
        limit = self.out_tokens.shape[1]
        if reqs == 0:
            return
        _expand_kernel[(reqs,)](
            self.topk_tokens,
            self.topk_logprobs,
            self.slots,
            self.out_tokens,
            self.parents,
            self.depths,
            self.log_rho,
            self.num_nodes,
            *self.topk_tokens.stride(),
            *self.topk_logprobs.stride(),
            self.out_tokens.stride(0),
            self.parents.stride(0),
            self.depths.stride(0),
            self.log_rho.stride(0),
            D=depth,
            K=width,
            N=limit,
            BLOCK=max(32, triton.next_power_of_2(limit)),
            num_warps=1,
        )


expand_best_first = public(ExpandBestFirst, cpu="bastion_kernels.cpu.draft")
