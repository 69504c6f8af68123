# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel of `frontier`: scores of a depth's candidates, and the best new prefixes."""

from __future__ import annotations

from bastion_kernels.draft.best_first_kernel import cost_of
from bastion_kernels.triton_or_none import tl, triton


@triton.jit
def kth_smallest(bits, K: tl.constexpr, OF_ALL: tl.constexpr):
    """The K-th smallest of int32 keys [X, Y] >= 0: of each row, or with OF_ALL of all; [X]."""
    least = tl.sum(bits * 0, 1)
    for step in range(31):
        raised = least | (1 << (30 - step))
        below = tl.sum((bits < raised[:, None]).to(tl.int32), 1)
        if OF_ALL:
            below = tl.sum(below, 0) + below * 0
        least = tl.where(below < K, raised, least)
    return least


@triton.jit
def extend_kernel(
    base_ptr,
    position_ptr,
    latent_ptr,
    weight_ptr,
    costs_ptr,
    logprobs_ptr,
    rows_ptr,
    parents_ptr,
    children_ptr,
    out_costs_ptr,
    base_r,
    position_r,
    latent_r,
    latent_p,
    weight_r,
    logprobs_r,
    rows_r,
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
    req = tl.program_id(0).to(tl.int64)
    prefix, candidate = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_M)
    is_prefix, is_candidate = prefix < P, candidate < M
    real = is_prefix[:, None] & is_candidate[None, :]
    base = tl.load(base_ptr + req * base_r + candidate, mask=is_candidate, other=float("-inf"))
    scores = tl.zeros([BLOCK_P, BLOCK_M], tl.float32)
    if CORRECTED:
        latent_ptr += req * latent_r + prefix[:, None] * latent_p
        weight_ptr += req * weight_r + candidate[None, :] * E
        for start in range(0, E, BLOCK_E):
            column = start + tl.arange(0, BLOCK_E)
            inside = column < E
            mask = is_prefix[:, None] & inside[None, :]
            latent = tl.load(latent_ptr + column[None, :], mask=mask, other=0.0).to(tl.float32)
            position = tl.load(position_ptr + req * position_r + column, mask=inside, other=0.0)
            latent += position.to(tl.float32)[None, :]
            latent = latent / (1.0 + tl.exp(-latent))
            mask = inside[:, None] & is_candidate[None, :]
            weight = tl.load(weight_ptr + column[:, None], mask=mask, other=0.0)
            scores += tl.dot(latent.to(weight.dtype), weight, input_precision="ieee")
    scores += base[None, :]
    scores = tl.where(is_candidate[None, :], scores, float("-inf"))
    shifted = scores - tl.max(scores, 1)[:, None]
    logprobs = shifted - tl.log(tl.sum(tl.exp(shifted), 1))[:, None]
    entry = prefix[:, None] * M + candidate[None, :]
    tl.store(logprobs_ptr + req * logprobs_r + entry, logprobs, mask=real)

    none = tl.full([], float("inf"), tl.float32).to(tl.int32, bitcast=True)
    above = tl.load(costs_ptr + req * P + prefix, mask=is_prefix, other=float("inf"))
    own = cost_of(logprobs)
    bits = tl.where(real, own.to(tl.int32, bitcast=True), none)
    if TOP_K < M:
        limit = kth_smallest(bits, TOP_K, False)[:, None]
        ties = (bits == limit).to(tl.int32)
        room = TOP_K - tl.sum((bits < limit).to(tl.int32), 1)[:, None]
        allowed = (bits < limit) | ((ties > 0) & (tl.cumsum(ties, 1) <= room))
    else:
        allowed = real
    cost = above[:, None] + own
    bits = tl.where(allowed & real, cost.to(tl.int32, bitcast=True), none)
    limit = kth_smallest(bits, B, True)[:, None]
    ties = (bits == limit).to(tl.int32)
    count = tl.sum(ties, 1)
    rank = (tl.cumsum(count, 0) - count)[:, None] + tl.cumsum(ties, 1)
    below = tl.sum(tl.sum((bits < limit).to(tl.int32), 1), 0)
    kept = ((bits < limit) | ((ties > 0) & (rank <= B - below))) & (bits < none)
    one = kept.to(tl.int32)
    count = tl.sum(one, 1)
    place = (tl.cumsum(count, 0) - count)[:, None] + tl.cumsum(one, 1) - 1
    tl.store(rows_ptr + req * rows_r + entry, tl.where(kept, place, -1), mask=real)
    used = tl.sum(count, 0)
    nothing = tl.zeros([BLOCK_P, BLOCK_M], tl.int32)
    tl.store(parents_ptr + req * B + place, nothing + prefix[:, None], mask=kept)
    tl.store(children_ptr + req * B + place, nothing + candidate[None, :], mask=kept)
    tl.store(out_costs_ptr + req * B + place, cost, mask=kept)
    place = tl.arange(0, BLOCK_B)
    unused = (place >= used) & (place < B)
    zeros = tl.zeros([BLOCK_B], tl.int32)
    tl.store(parents_ptr + req * B + place, zeros, mask=unused)
    tl.store(children_ptr + req * B + place, zeros, mask=unused)
    tl.store(out_costs_ptr + req * B + place, zeros.to(tl.float32) + float("inf"), mask=unused)
