# SPDX-License-Identifier: Apache-2.0
"""The rank of every node among the nodes of all requests, by path score, best first.

Each request's nodes are sorted already: a node's rank is its own column plus, by binary search, the
number of better nodes in every other request. Ties go to the lower row, so the ranks are a
permutation of 0, 1, .. and equal on all ranks of a tensor-parallel group. A search is a chain of
log2(N) loads; several requests are searched in parallel to overlap the chains.
"""

from __future__ import annotations

from bastion_kernels.triton_or_none import tl, triton

__all__ = ["rank_constants", "ranks"]


@triton.jit
def ranks(
    log_rho,
    slots,
    limits,
    reqs,
    stride_log_rho_s,
    i_r,
    slot,
    N: tl.constexpr,
    EMPTY: tl.constexpr,
    BLOCK: tl.constexpr,
    RIVALS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Score, node mask and rank of each column of one request, each `[BLOCK]`.

    The request is row `i_r` of the batch, in `slot`. Columns of score -inf are nodes only if EMPTY.
    Ranks outside the mask are undefined.
    """
    o_n = tl.arange(0, BLOCK)
    m_n = o_n < tl.minimum(tl.load(limits + slot), N)
    b_score = tl.load(log_rho + slot * stride_log_rho_s + o_n, mask=m_n, other=float("-inf"))
    if not EMPTY:
        m_n = b_score > float("-inf")
    b_ahead = tl.zeros([RIVALS, BLOCK], tl.int32)
    for start in range(0, tl.where(reqs > 1, reqs, 0), RIVALS):
        o_other = start + tl.arange(0, RIVALS)
        m_rival = (o_other < reqs) & (o_other != i_r)
        b_slot = tl.load(slots + o_other, mask=m_rival, other=-1)
        b_nodes = tl.load(limits + b_slot, mask=b_slot >= 0, other=0)
        b_nodes = tl.minimum(b_nodes, N)[:, None]
        p_list = log_rho + (b_slot * stride_log_rho_s)[:, None] - 1
        m_wins = (o_other < i_r)[:, None]
        # number of the other request's nodes before this one, from the highest bit down
        b_found = tl.zeros([RIVALS, BLOCK], tl.int32)
        for step in range(STEPS):
            b_candidate = b_found + (1 << (STEPS - 1 - step))
            # NaN past the end compares false
            b_theirs = tl.load(
                p_list + b_candidate, mask=b_candidate <= b_nodes, other=float("nan")
            )
            m_before = (b_theirs > b_score[None, :]) | ((b_theirs == b_score[None, :]) & m_wins)
            b_found = tl.where(m_before, b_candidate, b_found)
        b_ahead += b_found
    return b_score, m_n, o_n + tl.sum(b_ahead, 0)


def rank_constants(limit: int) -> dict[str, int]:
    """Constants and warps of a kernel that calls `ranks`. They depend on N, never on R.

    A thread runs at most 8 searches: more would run out of registers.
    """
    block = triton.next_power_of_2(limit)
    return {
        "N": limit,
        "BLOCK": block,
        "RIVALS": min(max(2048 // block, 1), 16),
        "STEPS": limit.bit_length(),
        "num_warps": min(max(block // 16, 1), 8),
    }
