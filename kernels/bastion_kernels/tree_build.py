# SPDX-License-Identifier: Apache-2.0
"""Best-first expansion of the drafter's top-K lattice into the N best nodes of every request.

A node is a prefix (k_1, .., k_d) of candidate ranks, one per depth; its path score is

    log rho = sum_{i <= d} log q_i(x_{k_i})            (paper, section 3.1)

and best-first expansion adds the open node of largest rho, N times (Algorithm 1). A child never
beats its parent, so the nodes come out in non-increasing rho and every prefix of them is the
optimal prefix-closed tree of its size (Proposition 2).

The frontier needs one entry per node of the tree: the best child of that node not taken yet. Taking
it adds a node (with an entry of its own) and moves the entry on to the next sibling. Ties go to the
lower parent number, and the sums are rounded to fp32 from the root down, so that the result is one
definite tree, whoever computes it.
"""

from __future__ import annotations

import ctypes
import heapq
import math

import torch
from torch import Tensor

from bastion_kernels.checks import check

__all__ = ["expand_best_first", "expand_best_first_reference"]

_OP = "expand_best_first"
_Node = tuple[int, int, int, float]  # token, parent, depth, log rho
_UNUSED: _Node = (0, -1, 0, -math.inf)


def _expand_one(tokens: list[list[int]], logprobs: list[list[float]], limit: int) -> list[_Node]:
    """The `limit` best nodes of one lattice `[D, K]`, by a heap."""
    nodes: list[_Node] = [(0, -1, 0, 0.0)]  # the root, dropped at the end
    heap: list[tuple[float, int, int]] = []  # -log rho, parent, rank: ties to the lower parent

    def push(parent: int, rank: int) -> None:
        _, _, depth, log_rho = nodes[parent]
        if depth < len(tokens) and rank < len(tokens[depth]):
            cost = ctypes.c_float(-log_rho - min(logprobs[depth][rank], 0.0)).value
            if cost < math.inf:  # neither impossible nor NaN
                heapq.heappush(heap, (cost, parent, rank))

    push(0, 0)
    while heap and len(nodes) <= limit:
        cost, parent, rank = heapq.heappop(heap)
        depth = nodes[parent][2]
        nodes.append((tokens[depth][rank], parent, depth + 1, 0.0 - cost))
        push(len(nodes) - 1, 0)
        push(parent, rank + 1)
    return nodes[1:]


def expand_best_first_reference(
    topk_tokens: Tensor,
    topk_logprobs: Tensor,
    spine_only: Tensor,
    slots: Tensor,
    out_tokens: Tensor,
    parents: Tensor,
    depths: Tensor,
    log_rho: Tensor,
    num_nodes: Tensor,
) -> None:
    """Algorithm 1 with a heap of first children and next siblings; see `expand_best_first`."""
    limit = out_tokens.shape[1]
    for r, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        ranks = 1 if spine_only[slot] else topk_tokens.shape[2]
        nodes = _expand_one(
            topk_tokens[r, :, :ranks].tolist(), topk_logprobs[r, :, :ranks].tolist(), limit
        )
        num_nodes[slot] = len(nodes)
        columns = zip(*nodes, *[_UNUSED] * (limit - len(nodes)), strict=True)
        rows = (out_tokens[r], parents[slot], depths[slot], log_rho[slot])
        for row, column in zip(rows, columns, strict=True):
            row.copy_(torch.tensor(column, dtype=row.dtype))


def expand_best_first(
    topk_tokens: Tensor,
    topk_logprobs: Tensor,
    spine_only: Tensor,
    slots: Tensor,
    out_tokens: Tensor,
    parents: Tensor,
    depths: Tensor,
    log_rho: Tensor,
    num_nodes: Tensor,
) -> None:
    """Write the first N nodes of every request's best-first tree, in non-increasing rho.

    Draft node j is column j and node number j + 1; number 0 is the root. Row r's tokens go to row r
    of `out_tokens`, the rest to row `slots[r]`; a row with `slots[r] == -1` writes nothing. Unused
    columns get token 0, parent -1, depth 0, log rho -inf. A candidate of log-probability -inf or
    NaN, and the ones ranked after it, are left out.

    Args:
        topk_tokens: `[R, D, K]` int32, candidates of each depth, best first.
        topk_logprobs: `[R, D, K]` fp32, their log-probabilities, non-increasing along K; a value
            above 0 is read as 0.
        spine_only: `[S]` bool, by slot: only the chain of rank-0 candidates, min(D, N) nodes.
        slots: `[R]` int64, request slot of each row, or -1.
        out_tokens: `[R, N]` int64, written.
        parents: `[S, N]` int32, node number of the parent, written.
        depths: `[S, N]` int32, 1..D, written.
        log_rho: `[S, N]` fp32, path scores, written.
        num_nodes: `[S]` int32, columns in use, written.

    Raises:
        ValueError, TypeError: shapes or dtypes do not fit together.
    """
    reqs, depth, width = topk_tokens.shape
    num_slots, limit = parents.shape
    check(_OP, "topk_tokens", topk_tokens, (reqs, depth, width), torch.int32)
    check(_OP, "topk_logprobs", topk_logprobs, (reqs, depth, width), torch.float32)
    check(_OP, "spine_only", spine_only, (num_slots,), torch.bool)
    check(_OP, "slots", slots, (reqs,), torch.int64)
    check(_OP, "out_tokens", out_tokens, (reqs, limit), torch.int64)
    check(_OP, "parents", parents, (num_slots, limit), torch.int32)
    check(_OP, "depths", depths, (num_slots, limit), torch.int32)
    check(_OP, "log_rho", log_rho, (num_slots, limit), torch.float32)
    check(_OP, "num_nodes", num_nodes, (num_slots,), torch.int32)
    expand_best_first_reference(
        topk_tokens,
        topk_logprobs,
        spine_only,
        slots,
        out_tokens,
        parents,
        depths,
        log_rho,
        num_nodes,
    )
