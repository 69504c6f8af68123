# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel of `frontier`: scores of a depth's candidates, and the best new prefixes."""

from __future__ import annotations

from bastion_kernels.draft.best_first_kernel import cost_of
from bastion_kernels.triton_or_none import tl, triton


@triton.jit
def kth_smallest(b_bits, K: tl.constexpr, OF_ALL: tl.constexpr):
    """`[X]`: the K-th smallest of int32 keys `[X, Y]` >= 0 in each row, or with OF_ALL in all."""
    b_least = tl.sum(b_bits * 0, 1)
    for step in range(31):
        b_raised = b_least | (1 << (30 - step))
        b_below = tl.sum((b_bits < b_raised[:, None]).to(tl.int32), 1)
        if OF_ALL:
            b_below = tl.sum(b_below, 0) + b_below * 0
        b_least = tl.where(b_below < K, b_raised, b_least)
    return b_least


@triton.jit
def extend_kernel(
    base,
    position,
    latent,
    weight,
    costs,
    logprobs,
    rows,
    parents,
    children,
    out_costs,
    stride_base_r,
    stride_position_r,
    stride_latent_r,
    stride_latent_p,
    stride_weight_r,
    stride_logprobs_r,
    stride_rows_r,
    P: tl.constexpr,
    M: tl.constexpr,
    E: tl.constexpr,
    B: tl.constexpr,
    TOP_K: tl.constexpr,
    CORRECTED: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Grid: (R,). Element [p, m] belongs to candidate m after prefix p."""
    i_r = tl.program_id(0).to(tl.int64)
    o_p, o_m = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_M)
    m_p, m_m = o_p < P, o_m < M
    m_pm = m_p[:, None] & m_m[None, :]
    b_base = tl.load(base + i_r * stride_base_r + o_m, mask=m_m, other=float("-inf"))
    b_scores = tl.zeros([BLOCK_P, BLOCK_M], tl.float32)
    if CORRECTED:
        latent += i_r * stride_latent_r + o_p[:, None] * stride_latent_p
        weight += i_r * stride_weight_r + o_m[None, :] * E
        for start in range(0, E, BLOCK_E):
            o_e = start + tl.arange(0, BLOCK_E)
            m_e = o_e < E
            m_load = m_p[:, None] & m_e[None, :]
            b_latent = tl.load(latent + o_e[None, :], mask=m_load, other=0.0).to(tl.float32)
            b_position = tl.load(position + i_r * stride_position_r + o_e, mask=m_e, other=0.0)
            b_latent += b_position.to(tl.float32)[None, :]
            b_latent = b_latent / (1.0 + tl.exp(-b_latent))
            m_load = m_e[:, None] & m_m[None, :]
            b_weight = tl.load(weight + o_e[:, None], mask=m_load, other=0.0)
            b_scores += tl.dot(b_latent.to(b_weight.dtype), b_weight, input_precision="ieee")
    b_scores += b_base[None, :]
    b_scores = tl.where(m_m[None, :], b_scores, float("-inf"))
    b_shifted = b_scores - tl.max(b_scores, 1)[:, None]
    b_logprobs = b_shifted - tl.log(tl.sum(tl.exp(b_shifted), 1))[:, None]
    o_pm = o_p[:, None] * M + o_m[None, :]
    tl.store(logprobs + i_r * stride_logprobs_r + o_pm, b_logprobs, mask=m_pm)

    none = tl.full([], float("inf"), tl.float32).to(tl.int32, bitcast=True)
    b_above = tl.load(costs + i_r * P + o_p, mask=m_p, other=float("inf"))
    b_own = cost_of(b_logprobs)
    b_bits = tl.where(m_pm, b_own.to(tl.int32, bitcast=True), none)
    if TOP_K < M:
        b_limit = kth_smallest(b_bits, TOP_K, False)[:, None]
        b_ties = (b_bits == b_limit).to(tl.int32)
        b_room = TOP_K - tl.sum((b_bits < b_limit).to(tl.int32), 1)[:, None]
        m_allowed = (b_bits < b_limit) | ((b_ties > 0) & (tl.cumsum(b_ties, 1) <= b_room))
    else:
        m_allowed = m_pm
    b_cost = b_above[:, None] + b_own
    b_bits = tl.where(m_allowed & m_pm, b_cost.to(tl.int32, bitcast=True), none)
    b_limit = kth_smallest(b_bits, B, True)[:, None]
    b_ties = (b_bits == b_limit).to(tl.int32)
    b_count = tl.sum(b_ties, 1)
    b_rank = (tl.cumsum(b_count, 0) - b_count)[:, None] + tl.cumsum(b_ties, 1)
    below = tl.sum(tl.sum((b_bits < b_limit).to(tl.int32), 1), 0)
    m_kept = ((b_bits < b_limit) | ((b_ties > 0) & (b_rank <= B - below))) & (b_bits < none)
    b_one = m_kept.to(tl.int32)
    b_count = tl.sum(b_one, 1)
    o_b = (tl.cumsum(b_count, 0) - b_count)[:, None] + tl.cumsum(b_one, 1) - 1
    tl.store(rows + i_r * stride_rows_r + o_pm, tl.where(m_kept, o_b, -1), mask=m_pm)
    used = tl.sum(b_count, 0)
    b_zero = tl.zeros([BLOCK_P, BLOCK_M], tl.int32)
    tl.store(parents + i_r * B + o_b, b_zero + o_p[:, None], mask=m_kept)
    tl.store(children + i_r * B + o_b, b_zero + o_m[None, :], mask=m_kept)
    tl.store(out_costs + i_r * B + o_b, b_cost, mask=m_kept)
    o_b = tl.arange(0, BLOCK_B)
    m_unused = (o_b >= used) & (o_b < B)
    b_zeros = tl.zeros([BLOCK_B], tl.int32)
    tl.store(parents + i_r * B + o_b, b_zeros, mask=m_unused)
    tl.store(children + i_r * B + o_b, b_zeros, mask=m_unused)
    tl.store(out_costs + i_r * B + o_b, b_zeros.to(tl.float32) + float("inf"), mask=m_unused)
