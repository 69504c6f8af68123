# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel of `best_first`: one warp per request takes one node per round.

The frontier stays in the warp's registers, so a round has no barrier and stores nothing. Scores are
costs -log rho >= 0, whose fp32 bits sort like integers. Parent number, depth and rank of the winner
are packed into one integer, whose minimum among equal costs breaks ties.
"""

from __future__ import annotations

from bastion_kernels.triton_or_none import tl, triton


@triton.jit
def cost_of(b_logprob):
    """-logprob, at least +0.0. NaN becomes +inf, like an impossible candidate."""
    b_cost = tl.where(b_logprob < 0.0, 0.0 - b_logprob, 0.0)
    return tl.where(b_logprob == b_logprob, b_cost, float("inf"))


@triton.jit
def _next(p_row, stride, size, p_ngram, ngram_size, after_cost, after, BLOCK_M: tl.constexpr):
    """The next cost and candidate of a row after (after_cost, after); +inf if none is left.

    size: candidates of the row, or 0. ngram_size: candidates of the row at `p_ngram`, or 0; at most
    one of the two rows is read. after_cost: int32 bits of a cost, which sort like it; -1 for the
    first.
    """
    o_m = tl.arange(0, BLOCK_M)
    b_logprob = tl.load(p_row + o_m * stride, mask=o_m < size, other=float("-inf"))
    if p_ngram is not None:
        b_ngram = tl.load(p_ngram + o_m, mask=o_m < ngram_size, other=float("-inf"))
        b_logprob = tl.where(ngram_size > 0, b_ngram, b_logprob)
    b_bits = cost_of(b_logprob).to(tl.int32, bitcast=True)
    m_later = (b_bits > after_cost) | ((b_bits == after_cost) & (o_m > after))
    none = tl.full([], float("inf"), tl.float32).to(tl.int32, bitcast=True)
    b_bits = tl.where(m_later, b_bits, none)
    least = tl.min(b_bits, 0)
    found = tl.min(tl.where(b_bits == least, o_m, BLOCK_M), 0)
    return least.to(tl.float32, bitcast=True), found


@triton.jit
def expand_kernel(
    candidates,
    logprobs,
    slots,
    out_tokens,
    parents,
    depths,
    log_rho,
    num_nodes,
    ngram_tokens,
    places,
    ngram_rows,
    sources,
    stride_candidates_r,
    stride_candidates_d,
    stride_candidates_m,
    stride_logprobs_r,
    stride_logprobs_d,
    stride_logprobs_p,
    stride_logprobs_m,
    stride_ngram_tokens_r,
    stride_ngram_rows_r,
    stride_sources_s,
    stride_out_tokens_r,
    stride_parents_s,
    stride_depths_s,
    stride_log_rho_s,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    TOP_K: tl.constexpr,
    IN_ORDER: tl.constexpr,
    L: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Grid: (R,). The frontier is in registers. Column i belongs to node i + 1. The last column
    also belongs to the root; node BLOCK may overwrite it, because the loop ends with that node.

    b_cost  [BLOCK] int32, bits of -log rho (fp32) of the node's next child; +inf if none is left
    b_entry [BLOCK] int32, node number << 16 | middle << 8 | rank of that child. The middle is the
            child's candidate; with IN_ORDER (candidate = rank) it is the node's depth
    b_score [BLOCK] fp32, -log rho of the node itself
    b_own   [BLOCK] int32, 1 << 16 on the n-gram draft | depth of the node << 8 | its candidate,
            also the row of its children; with IN_ORDER the entry by which the node was added
    b_above [BLOCK] int32, parent of the node; unused with IN_ORDER, as `b_own` has it
    """
    i_r = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + i_r)
    if slot >= 0:
        candidates += i_r * stride_candidates_r
        logprobs += i_r * stride_logprobs_r
        none = tl.full([], float("inf"), tl.float32).to(tl.int32, bitcast=True)

        o_n = tl.arange(0, BLOCK)
        b_owner = (o_n + 1) % BLOCK
        on_ngram = tl.full([], 0, tl.int32)
        if L > 0:
            ngram_tokens += i_r * stride_ngram_tokens_r
            places += i_r * stride_ngram_tokens_r
            ngram_rows += i_r * stride_ngram_rows_r
            on_ngram = (tl.load(places) >= 0).to(tl.int32)
        if IN_ORDER:
            first, middle = cost_of(tl.load(logprobs)), 0
        else:
            size = tl.where((on_ngram == 0) & (D > 0), M, 0)
            first, middle = _next(
                logprobs, stride_logprobs_m, size, ngram_rows, on_ngram * (M + 1), -1, -1, BLOCK_M
            )
        b_cost = tl.where(b_owner == 0, first, float("inf")).to(tl.int32, bitcast=True)
        b_entry = tl.where(b_owner == 0, middle << 8, 0)
        b_score = tl.zeros([BLOCK], tl.float32)
        b_above = tl.zeros([BLOCK], tl.int32)
        b_own = tl.where(b_owner == 0, on_ngram << 16, 0)
        count = tl.full([], 0, tl.int32)
        best = tl.min(b_cost, 0)
        while (count < N) & (best < none):
            winner = tl.min(tl.where(b_cost == best, b_entry, 0x7FFFFFFF), 0)
            parent, middle, rank = winner >> 16, (winner >> 8) & 0xFF, winner & 0xFF
            m_moved, m_opened = b_owner == parent, o_n == count
            new = best.to(tl.float32, bitcast=True)
            count += 1
            # advance the winner's entry to the next sibling; open an entry for the new node
            if IN_ORDER:
                depth = middle
                p_value = logprobs + depth * stride_logprobs_d + (rank + 1) * stride_logprobs_m
                sibling_cost = cost_of(tl.load(p_value, mask=rank + 1 < TOP_K, other=float("-inf")))
                p_value = logprobs + (depth + 1) * stride_logprobs_d
                child_cost = cost_of(tl.load(p_value, mask=depth + 1 < D, other=float("-inf")))
                b_entry = tl.where(m_moved, b_entry + 1, b_entry)
                b_entry = tl.where(m_opened, (count << 16) | ((depth + 1) << 8), b_entry)
                b_own = tl.where(m_opened, winner, b_own)
            else:
                candidate = middle
                parent_own = tl.sum(tl.where(m_moved, b_own, 0), 0)
                on_ngram = parent_own >> 16
                depth, parent_row = (parent_own >> 8) & 0xFF, parent_own & 0xFF
                p_row = logprobs + depth * stride_logprobs_d + parent_row * stride_logprobs_p
                p_value = p_row + candidate * stride_logprobs_m
                taken = tl.load(p_value, mask=on_ngram == 0, other=float("-inf"))
                more = rank + 1 < TOP_K
                p_ngram, ngram_size, is_ngram = ngram_rows, 0, on_ngram
                if L > 0:
                    p_ngram += depth * (M + 1)
                    ngram_size = tl.where((on_ngram != 0) & more, M + 1, 0)
                    p_value = p_ngram + candidate
                    taken = tl.where(
                        on_ngram == 0,
                        taken,
                        tl.load(p_value, mask=on_ngram != 0, other=float("-inf")),
                    )
                    place = tl.load(places + depth, mask=on_ngram != 0, other=-1)
                    is_ngram = (candidate == place).to(tl.int32)
                taken = cost_of(taken).to(tl.int32, bitcast=True)
                size = tl.where(more & (on_ngram == 0), M, 0)
                sibling_cost, sibling = _next(
                    p_row, stride_logprobs_m, size, p_ngram, ngram_size, taken, candidate, BLOCK_M
                )
                p_row = logprobs + (depth + 1) * stride_logprobs_d + candidate * stride_logprobs_p
                size = tl.where((depth + 1 < D) & (is_ngram == 0), M, 0)
                if L > 0:
                    p_ngram += M + 1
                    ngram_size = tl.where((is_ngram != 0) & (depth + 1 < L), M + 1, 0)
                child_cost, child = _next(
                    p_row, stride_logprobs_m, size, p_ngram, ngram_size, -1, -1, BLOCK_M
                )
                b_entry = tl.where(m_moved, (parent << 16) | (sibling << 8) | (rank + 1), b_entry)
                b_entry = tl.where(m_opened, (count << 16) | (child << 8), b_entry)
                b_above = tl.where(m_opened, parent, b_above)
                new_own = (is_ngram << 16) | ((depth + 1) << 8) | candidate
                b_own = tl.where(m_opened, new_own, b_own)
            b_cost = tl.where(m_moved, (b_score + sibling_cost).to(tl.int32, bitcast=True), b_cost)
            b_cost = tl.where(m_opened, (new + child_cost).to(tl.int32, bitcast=True), b_cost)
            b_score = tl.where(m_opened, new, b_score)
            best = tl.min(b_cost, 0)

        m_used, m_n = o_n < count, o_n < N
        if IN_ORDER:
            b_above, b_depth, b_candidate = b_own >> 16, ((b_own >> 8) & 0xFF) + 1, b_own & 0xFF
        else:
            b_depth, b_candidate = (b_own >> 8) & 0xFF, b_own & 0xFF
        p_token = candidates + (b_depth - 1) * stride_candidates_d
        p_token += b_candidate * stride_candidates_m
        b_token = tl.load(p_token, mask=m_used & (b_candidate < M), other=0).to(tl.int64)
        if L > 0:
            m_alone = m_used & (b_candidate == M)
            b_ngram = tl.load(ngram_tokens + b_depth - 1, mask=m_alone, other=0).to(tl.int64)
            b_token = tl.where(m_alone, b_ngram, b_token)
            b_source = tl.where(b_own >> 16 == 0, 1, tl.where(b_candidate < M, 3, 2))
            b_source = tl.where(m_used, b_source, 0)
            tl.store(sources + slot * stride_sources_s + o_n, b_source, mask=m_n)
        tl.store(out_tokens + i_r * stride_out_tokens_r + o_n, b_token, mask=m_n)
        tl.store(parents + slot * stride_parents_s + o_n, tl.where(m_used, b_above, -1), mask=m_n)
        tl.store(depths + slot * stride_depths_s + o_n, tl.where(m_used, b_depth, 0), mask=m_n)
        b_score = tl.where(m_used, -b_score, float("-inf"))
        tl.store(log_rho + slot * stride_log_rho_s + o_n, b_score, mask=m_n)
        tl.store(num_nodes + slot, count)
