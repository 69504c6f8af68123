# SPDX-License-Identifier: Apache-2.0
"""Triton kernel of tree attention: one launch per layer, divided as `plan_kernel` says.

A q-block is BLOCK_Q query rows of one request. Packed with the GROUP heads of one key head, it
fills BLOCK_M >= BLOCK_Q * GROUP rows of a matrix product. A program processes one run of the work
list (see `plan`): one q-block in each bundle of the run. The grid is constant, and all that changes
between steps is read from device memory, so a CUDA graph can capture the launch.

A q-block inside one run is written directly. If a run boundary cuts a q-block, every program stores
its partial result (output, maximum, sum; unnormalised, fp32), and a counter tells the last program
to merge them, in the order of the tiles: repeated runs are bit-equal.
"""

from __future__ import annotations

from bastion_kernels.attention.plan import first_tile
from bastion_kernels.attention.tile import add_unbounded, scores, weights
from bastion_kernels.triton_or_none import tl, triton

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _bundle(p_entry, KV_HEADS: tl.constexpr):
    """The fields of a bundle as `plan_kernel` writes them; the start is scaled to all heads."""
    request = tl.load(p_entry)
    row = tl.load(p_entry + 1)
    start = tl.load(p_entry + 2) * KV_HEADS
    tiles = tl.load(p_entry + 3)
    first = tl.load(p_entry + 4)
    rows = tl.load(p_entry + 5)
    context = tl.load(p_entry + 6)
    return request, row, start, tiles, first, rows, context


@triton.jit
def tree_attention_kernel(
    # [T, Hq, d]
    query,
    # [blocks, Hkv, PAGE, 2d]
    kv_cache,
    # [R, *] int32
    block_table,
    # [R] int32, [R] int64
    tail_lens,
    slots,
    # [S, N+1, W] int32
    ancestor_bits,
    # [S, N] int32, [Hq] float32, or None
    depths,
    sinks,
    # [1] float32 each, or None
    q_scale,
    k_scale,
    v_scale,
    # [T, Hq, d] (written)
    out,
    # the plan
    header,
    bundles,
    runs,
    # [programs, 2, BLOCK_M, BLOCK_D] and [programs, 2, 2, BLOCK_M] float32 (written)
    partial,
    partial_stats,
    # [programs] int32, zero before and after
    arrived,
    score_scale,
    softcap,
    stride_query_row,
    stride_query_head,
    stride_query_col,
    stride_out_row,
    stride_out_head,
    stride_out_col,
    stride_table,
    stride_bits_slot,
    stride_bits_node,
    stride_bits_word,
    words,
    stride_depths,
    # of the cache; constants make a page's address one instruction
    STRIDE_KV_BLOCK: tl.constexpr,
    STRIDE_KV_HEAD: tl.constexpr,
    STRIDE_KV_ROW: tl.constexpr,
    STRIDE_KV_COL: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    MAX_TAIL: tl.constexpr,
    STAGES: tl.constexpr,
    MERGE_STAGES: tl.constexpr,
    BUNDLE_FIELDS: tl.constexpr,
    RUN_FIELDS: tl.constexpr,
):
    """Attend for one run of the plan. Grid: (programs,)."""
    i_p = tl.program_id(0)
    chunk = tl.load(header)
    p_run = runs + i_p * RUN_FIELDS
    bundle = tl.load(p_run)
    member = tl.load(p_run + 1)
    members = tl.load(p_run + 2)
    line = tl.load(p_run + 3)
    stop = tl.load(p_run + 4)
    request, bundle_row, bundle_start, bundle_tiles, first, rows, context = _bundle(
        p_run + RUN_FIELDS - BUNDLE_FIELDS, KV_HEADS
    )
    team = line // chunk

    o_m = tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, BLOCK_D)
    if q_scale is not None:
        score_scale *= tl.load(q_scale)
    if k_scale is not None:
        score_scale *= tl.load(k_scale)
    # capped scores have the scale already
    exponent_scale = 1.0 if SOFTCAP else score_scale
    while line < stop:
        block_row = bundle_row + member * BLOCK_Q
        head = (line - bundle_start) // bundle_tiles
        # first position of this head in the line
        start = bundle_start + head * bundle_tiles
        begin = line - start

        slot = tl.load(slots + request)
        tail = tl.where(slot >= 0, tl.load(tail_lens + request), 0)
        o_row = block_row + o_m // GROUP
        m_m = (o_m < BLOCK_Q * GROUP) & (o_row < rows)
        o_h = head * GROUP + o_m % GROUP
        o_t = (first + o_row).to(tl.int64)
        m_q = m_m[:, None] & (o_d < DIM)[None, :]
        b_q = tl.load(
            query
            + (o_t * stride_query_row + o_h * stride_query_head)[:, None]
            + o_d[None, :] * stride_query_col,
            mask=m_q,
            other=0.0,
        ).to(out.dtype.element_ty)
        b_position = context + o_row
        b_tail_row = tl.where(m_m, o_row - (rows - tail), -1)
        p_bits = ancestor_bits + slot * stride_bits_slot + b_tail_row * stride_bits_node
        context_end = context + rows - tail
        end = context + tl.minimum(block_row + BLOCK_Q, rows)
        skipped = first_tile(context, bundle_row, rows, WINDOW, MAX_TAIL, BLOCK_N)
        # earlier q-blocks of a bundle may need fewer tiles than its last
        tiles = (end + BLOCK_N - 1) // BLOCK_N - skipped
        finish = tl.minimum(stop - start, tiles)
        # teams of the first and the last tile
        first_team = start // chunk
        last_team = (start + tiles - 1) // chunk
        cut = (first_team != last_team) & (begin < finish)
        # At most one q-block begins in a run and ends after it: it uses that program's counter.
        p_counter = arrived + i_p - (team - first_team) * members
        # all rows of the block see all tiles before this one
        unmasked = tl.minimum(context + block_row + 1, context_end) // BLOCK_N
        # and all windows begin before this one
        inner = (tl.maximum(end - WINDOW, 0) + BLOCK_N - 1) // BLOCK_N
        p_depths = depths + slot * stride_depths if WINDOW else depths

        b_o = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        b_sum = tl.zeros([BLOCK_M], tl.float32)
        b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        p_table = block_table + request.to(tl.int64) * stride_table
        p_kv = kv_cache + head.to(tl.int64) * STRIDE_KV_HEAD
        # Page numbers are loaded one tile ahead: the loads of keys and values depend on them.
        # Columns are unsigned, so that dividing by a power of two is one instruction.
        o_n = ((skipped + begin) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.uint32)
        b_page = tl.load(p_table + o_n // PAGE, mask=o_n < end, other=0)
        for t in tl.range(skipped + begin, skipped + finish, num_stages=STAGES):
            o_n = (t * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.uint32)
            o_kv = b_page.to(tl.uint32).to(tl.uint64) * STRIDE_KV_BLOCK
            o_kv += (o_n % PAGE) * STRIDE_KV_ROW
            p_k = p_kv + o_kv[:, None] + o_d[None, :] * STRIDE_KV_COL
            # Memory past the end may hold NaN. Scores there are masked, so keys may be loaded
            # anyway; values must be masked, because 0 * NaN is NaN.
            m_v = (o_n < end)[:, None]
            if DIM == BLOCK_D:
                b_k = tl.load(p_k)
            else:
                b_k = tl.load(p_k, mask=(o_d < DIM)[None, :], other=0.0)
                m_v &= (o_d < DIM)[None, :]
            b_v = tl.load(p_k + DIM * STRIDE_KV_COL, mask=m_v, other=0.0)
            o_next = o_n + BLOCK_N
            b_page = tl.load(p_table + o_next // PAGE, mask=o_next < end, other=0)
            b_s = scores(
                b_q, b_k, o_n, t, unmasked, inner, context_end, end, b_position, b_tail_row, p_bits,
                stride_bits_word, words, p_depths, tail, score_scale, softcap, BLOCK_N, SOFTCAP,
                WINDOW,
            )  # fmt: skip
            b_p, b_rescale, b_max = weights(b_s, b_max, exponent_scale)
            b_sum = b_sum * b_rescale + tl.sum(b_p, 1)
            b_o = tl.dot(
                b_p.to(b_q.dtype),
                b_v.to(b_q.dtype),
                b_o * b_rescale[:, None],
                input_precision="ieee",
            )

        # The weight of a masked column is 0, but 0 * NaN is NaN. If a result is not finite, the
        # tiles are read again, and values that are not finite are added only to rows that see them.
        masked = skipped + finish > unmasked
        if WINDOW:
            masked |= skipped + begin < inner
        if masked:
            m_lost = (tl.abs(b_o) < float("inf")) == 0
            # Of both axes at once: Triton 3.7 fails on sm_100 at a maximum of maxima.
            if tl.max(m_lost.to(tl.int32)) > 0:
                b_o = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
                b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
                for t in tl.range(skipped + begin, skipped + finish, num_stages=1):
                    o_n = (t * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.uint32)
                    b_page = tl.load(p_table + o_n // PAGE, mask=o_n < end, other=0)
                    o_kv = b_page.to(tl.uint32).to(tl.uint64) * STRIDE_KV_BLOCK
                    o_kv += (o_n % PAGE) * STRIDE_KV_ROW
                    p_k = p_kv + o_kv[:, None] + o_d[None, :] * STRIDE_KV_COL
                    m_v = (o_n < end)[:, None] & (o_d < DIM)[None, :]
                    b_k = tl.load(p_k, mask=(o_d < DIM)[None, :], other=0.0)
                    b_v = tl.load(p_k + DIM * STRIDE_KV_COL, mask=m_v, other=0.0).to(b_q.dtype)
                    b_s = scores(
                        b_q, b_k, o_n, t, unmasked, inner, context_end, end, b_position,
                        b_tail_row, p_bits, stride_bits_word, words, p_depths, tail, score_scale,
                        softcap, BLOCK_N, SOFTCAP, WINDOW,
                    )  # fmt: skip
                    b_p, b_rescale, b_max = weights(b_s, b_max, exponent_scale)
                    b_o = tl.dot(
                        b_p.to(b_q.dtype),
                        tl.where(tl.abs(b_v) < float("inf"), b_v, 0.0),
                        b_o * b_rescale[:, None],
                        input_precision="ieee",
                    )
                    b_o = add_unbounded(
                        b_o, b_s, p_kv + (DIM + o_d) * STRIDE_KV_COL, p_table, o_d, t * BLOCK_N,
                        end, STRIDE_KV_BLOCK, STRIDE_KV_ROW, DIM, PAGE, BLOCK_N,
                    )  # fmt: skip

        complete = (first_team == last_team) & (begin < finish)
        if cut:
            # A run cuts at most two q-blocks: the one that began before it and the one that ends
            # after it. The last program stores its part, too: only the atomic below tells which
            # one is last. If warps read the counter instead, they could diverge on its value.
            place = (i_p * 2 + (begin == 0).to(tl.int32)).to(tl.int64)
            p_stats = partial_stats + place * 2 * BLOCK_M + o_m
            tl.store(p_stats, b_max, mask=m_m)
            tl.store(p_stats + BLOCK_M, b_sum, mask=m_m)
            p_into = partial + place * BLOCK_M * BLOCK_D + o_m[:, None] * BLOCK_D
            tl.store(p_into + o_d[None, :], b_o, mask=m_m[:, None])
            # the stores of all threads must precede the release by one thread
            tl.debug_barrier()
            before = tl.atomic_add(p_counter, 1, sem="acq_rel", scope="gpu")
            complete = before == last_team - first_team
            if complete:
                tl.store(p_counter, 0)
                b_own, b_own_sum, b_own_max = b_o, b_sum, b_max
                b_o = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
                b_sum = tl.zeros([BLOCK_M], tl.float32)
                b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
                for p in tl.range(first_team, last_team + 1, num_stages=MERGE_STAGES):
                    place = (i_p - (team - p) * members) * 2 + (p == first_team).to(tl.int32)
                    place = place.to(tl.int64)
                    m_other = tl.where(p == team, False, m_m)
                    p_stats = partial_stats + place * 2 * BLOCK_M + o_m
                    b_part_max = tl.load(p_stats, mask=m_other, other=0.0, cache_modifier=".cg")
                    b_part_sum = tl.load(
                        p_stats + BLOCK_M, mask=m_other, other=0.0, cache_modifier=".cg"
                    )
                    p_from = partial + place * BLOCK_M * BLOCK_D + o_m[:, None] * BLOCK_D
                    b_part = tl.load(
                        p_from + o_d[None, :], mask=m_other[:, None], other=0.0,
                        cache_modifier=".cg",
                    )  # fmt: skip
                    b_part_max = tl.where(p == team, b_own_max, b_part_max)
                    b_part_sum = tl.where(p == team, b_own_sum, b_part_sum)
                    b_part = tl.where(p == team, b_own, b_part)
                    b_new_max = tl.maximum(b_max, b_part_max)
                    b_base = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
                    b_weight = tl.exp2(b_max - b_base)
                    b_part_weight = tl.exp2(b_part_max - b_base)
                    b_o = b_o * b_weight[:, None] + b_part * b_part_weight[:, None]
                    b_sum = b_sum * b_weight + b_part_sum * b_part_weight
                    b_max = b_new_max
        if complete:
            if sinks is not None:
                # b_max is finite, because a row always sees itself
                b_sink = tl.load(sinks + o_h, mask=m_m, other=0.0) * LOG2_E
                b_new_max = tl.maximum(b_max, b_sink)
                b_o *= tl.exp2(b_max - b_new_max)[:, None]
                b_sum = b_sum * tl.exp2(b_max - b_new_max) + tl.exp2(b_sink - b_new_max)
            b_out = b_o / tl.where(m_m, b_sum, 1.0)[:, None]
            if v_scale is not None:
                b_out *= tl.load(v_scale)
            tl.store(
                out
                + (o_t * stride_out_row + o_h * stride_out_head)[:, None]
                + o_d[None, :] * stride_out_col,
                b_out.to(out.dtype.element_ty),
                mask=m_q,
            )
        line = tl.minimum(start + bundle_tiles, stop)
        if line == bundle_start + bundle_tiles * KV_HEADS and line < stop:
            bundle += 1
            request, bundle_row, bundle_start, bundle_tiles, first, rows, context = _bundle(
                bundles + bundle * BUNDLE_FIELDS, KV_HEADS
            )
