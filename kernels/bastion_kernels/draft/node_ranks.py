# SPDX-License-Identifier: Apache-2.0
"""The rank of every node in the list of all requests' nodes by path score, best first.

Each request's list is sorted, so no sort is needed: a node's rank is its own column plus, by binary
search, the number of better nodes in every other request. Equal scores go to the lower row, so the
ranks are a permutation of 0, 1, .. and the same on every rank of a tensor-parallel group. A search
is a chain of log2(N) loads; many requests are searched side by side to overlap the chains.
"""

from __future__ import annotations

from torch import Tensor

from bastion_kernels.triton_or_none import tl, triton

__all__ = ["rank_constants", "ranks", "sorted_nodes"]


def sorted_nodes(
    log_rho: Tensor, slots: Tensor, limits: Tensor, floor: float
) -> list[tuple[float, int, int]]:
    """(-log rho, row, slot) of all nodes of at least `floor`: best first, ties to the lower row."""
    nodes = []
    for r, slot in enumerate(slots.tolist()):
        if slot >= 0:
            scores = log_rho[slot, : max(int(limits[slot]), 0)].tolist()
            nodes += [(-score, r, slot) for score in scores if score >= floor]
    return sorted(nodes)


@triton.jit
def ranks(
    log_rho_ptr,
    slots_ptr,
    limits_ptr,
    reqs,
    log_rho_s,
    row,
    slot,
    N: tl.constexpr,
    EMPTY: tl.constexpr,
    BLOCK: tl.constexpr,
    RIVALS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Score, whether it is a node, and rank of each column of one request, each `[BLOCK]`.

    The request is `row` of the batch, in `slot`. Columns of score -inf are nodes only if EMPTY;
    the rank of a column that is no node is undefined.
    """
    column = tl.arange(0, BLOCK)
    mine = column < tl.minimum(tl.load(limits_ptr + slot), N)
    score = tl.load(log_rho_ptr + slot * log_rho_s + column, mask=mine, other=float("-inf"))
    if not EMPTY:
        mine = score > float("-inf")
    ahead = tl.zeros([RIVALS, BLOCK], tl.int32)
    for start in range(0, tl.where(reqs > 1, reqs, 0), RIVALS):
        other = start + tl.arange(0, RIVALS)
        rival = (other < reqs) & (other != row)
        other_slot = tl.load(slots_ptr + other, mask=rival, other=-1)
        nodes = tl.load(limits_ptr + other_slot, mask=other_slot >= 0, other=0)
        nodes = tl.minimum(nodes, N)[:, None]
        list_ptr = log_rho_ptr + (other_slot * log_rho_s)[:, None] - 1
        wins_ties = (other < row)[:, None]
        # how many nodes of the other request come before this one, from the highest bit down
        found = tl.zeros([RIVALS, BLOCK], tl.int32)
        for step in range(STEPS):
            candidate = found + (1 << (STEPS - 1 - step))
            # past the end there is NaN, which is before nothing
            theirs = tl.load(list_ptr + candidate, mask=candidate <= nodes, other=float("nan"))
            before = (theirs > score[None, :]) | ((theirs == score[None, :]) & wins_ties)
            found = tl.where(before, candidate, found)
        ahead += found
    return score, mine, column + tl.sum(ahead, 0)


def rank_constants(limit: int) -> dict[str, int]:
    """Constants and warps of a kernel that calls `ranks`. They depend on N, never on R.

    Each thread follows at most 8 searches: candidate would be short of registers.
    """
    block = triton.next_power_of_2(limit)
    return {
        "N": limit,
        "BLOCK": block,
        "RIVALS": min(max(2048 // block, 1), 16),
        "STEPS": limit.bit_length(),
        "num_warps": min(max(block // 16, 1), 8),
    }
