# SPDX-License-Identifier: Apache-2.0
"""Triton kernel of tree attention: one launch per layer, divided as `plan_kernel` says.

A q-block is BLOCK_Q query rows of one request, packed with the GROUP heads that share a key head
into BLOCK_M >= BLOCK_Q * GROUP rows of one matrix product. A program walks its run of the line of
bundles (`tree_attention_plan`), in each of which it has one q-block. So one request with a long
context fills the GPU exactly as many short ones do, the grid never changes, and everything that
changes from step to step is read from device memory: the launch can be captured in a graph.

A q-block that lies in one run is written at once. One that was cut is left by every program as
unnormalised (output, maximum, sum) in fp32, and merged by the program that arrives last, found by a
counter. A second kernel would cost every layer a launch and its latency, needed or not; the
merge in place costs nothing when no q-block was cut. Partial results are merged in the order of
their tiles whoever arrives last, so that a repeat is bit-equal. The last one's own is taken from
its registers.
"""

from __future__ import annotations

from bastion_kernels.attention.plan import first_tile
from bastion_kernels.triton_or_none import tl, triton

__all__ = ["bits_from", "tree_attention_kernel"]

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def bits_from(bits_row_ptr, stride_word, start, words, tail_row):
    """Bits start .. start + 31 of every row's ancestors, [BLOCK_M] int32; start may be negative."""
    word = tl.zeros_like(tail_row) + (start >> 5)
    low_ok = (tail_row >= 0) & (word >= 0) & (word < words)
    high_ok = (tail_row >= 0) & (word >= -1) & (word < words - 1)
    low_ptr = bits_row_ptr + word * stride_word
    low_word = tl.load(low_ptr, mask=low_ok, other=0).to(tl.uint32, bitcast=True)
    high_word = tl.load(low_ptr + stride_word, mask=high_ok, other=0)
    pair = (high_word.to(tl.int64) << 32) | low_word.to(tl.int64)
    return (pair >> (start & 31)).to(tl.int32)


@triton.jit
def _bundle(entry_ptr, KV_HEADS: tl.constexpr):
    """A bundle's values as `plan_kernel` writes them, its start counted over all heads."""
    request = tl.load(entry_ptr)
    row = tl.load(entry_ptr + 1)
    start = tl.load(entry_ptr + 2) * KV_HEADS
    tiles = tl.load(entry_ptr + 3)
    first = tl.load(entry_ptr + 4)
    rows = tl.load(entry_ptr + 5)
    context = tl.load(entry_ptr + 6)
    return request, row, start, tiles, first, rows, context


@triton.jit
def _hide(
    scores, column, start, end, position, tail_row, bits_row_ptr, stride_word, words, depths_ptr,
    tail, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Set the scores of columns that a row may not see to -inf.

    Args:
        start: the tile's first column, counted from the first column of the tail.
        end: first column that no row of the block sees.
        position, tail_row: `[BLOCK_M]`, cached row of the query row; its number in the tail or < 0.
        depths_ptr: depth of the request's node 1, 2, ...; read where there is a window.
        tail: rows of the tail.
    """
    visible = column[None, :] <= position[:, None]
    # tail rows look tail columns up, 32 at a time
    for k in tl.static_range((BLOCK_N + 31) // 32):
        bits = bits_from(bits_row_ptr, stride_word, start + 32 * k, words, tail_row)
        lane = tl.arange(0, BLOCK_N) - 32 * k
        mine = (lane >= 0) & (lane < 32) & (start + tl.arange(0, BLOCK_N) >= 0)
        ancestor = ((bits[:, None] >> (lane & 31)[None, :]) & 1) != 0
        visible = tl.where(mine[None, :] & (tail_row >= 0)[:, None], ancestor, visible)
    if WINDOW:
        # positions: a node's is its root's and its depth
        place = start + tl.arange(0, BLOCK_N)
        node = (place > 0) & (place < tail)
        depth = tl.load(depths_ptr + place - 1, mask=node, other=0)
        column_at = tl.where(node, column - place + depth, column)
        below = tail_row > 0
        depth = tl.load(depths_ptr + tail_row - 1, mask=below, other=0)
        row_at = tl.where(below, position - tail_row + depth, position)
        visible &= row_at[:, None] - column_at[None, :] < WINDOW
    # a row always sees itself, so that a batch with empty bits stays finite
    visible |= column[None, :] == position[:, None]
    visible &= (column < end)[None, :]
    return tl.where(visible, scores, float("-inf"))


@triton.jit
def tree_attention_kernel(
    # [T, Hq, d]
    query_ptr,
    # [blocks, Hkv, PAGE, 2d]
    kv_ptr,
    # [R, *] int32
    table_ptr,
    # [R] int32, [R] int64
    tail_lens_ptr,
    slots_ptr,
    # [S, N+1, W] int32
    bits_ptr,
    # [S, N] int32, [Hq] float32, or None
    depths_ptr,
    sinks_ptr,
    # [1] float32 each, or None
    q_scale_ptr,
    k_scale_ptr,
    v_scale_ptr,
    # [T, Hq, d] (written)
    out_ptr,
    # the plan
    header_ptr,
    bundles_ptr,
    runs_ptr,
    # [programs, 2, BLOCK_M, BLOCK_D] and [programs, 2, 2, BLOCK_M] float32 (written)
    partial_ptr,
    partial_stats_ptr,
    # [programs] int32, zero before and after
    arrived_ptr,
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
    # of the cache, constant so that a page's address is one instruction
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
    """Attention of one run of the plan. Grid: (programs,)."""
    program = tl.program_id(0)
    chunk = tl.load(header_ptr)
    run_ptr = runs_ptr + program * RUN_FIELDS
    bundle = tl.load(run_ptr)
    member = tl.load(run_ptr + 1)
    members = tl.load(run_ptr + 2)
    line = tl.load(run_ptr + 3)
    stop = tl.load(run_ptr + 4)
    request, bundle_row, bundle_start, bundle_tiles, first, rows, context = _bundle(
        run_ptr + RUN_FIELDS - BUNDLE_FIELDS, KV_HEADS
    )
    team = line // chunk

    packed = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    if q_scale_ptr is not None:
        score_scale *= tl.load(q_scale_ptr)
    if k_scale_ptr is not None:
        score_scale *= tl.load(k_scale_ptr)
    # capped scores have the scale already
    exponent_scale = 1.0 if SOFTCAP else score_scale
    while line < stop:
        block_row = bundle_row + member * BLOCK_Q
        head = (line - bundle_start) // bundle_tiles
        # where this head's part of the line starts
        start = bundle_start + head * bundle_tiles
        begin = line - start

        slot = tl.load(slots_ptr + request)
        tail = tl.where(slot >= 0, tl.load(tail_lens_ptr + request), 0)
        row = block_row + packed // GROUP
        live = (packed < BLOCK_Q * GROUP) & (row < rows)
        query_head = head * GROUP + packed % GROUP
        token = (first + row).to(tl.int64)
        inside = live[:, None] & (dim < DIM)[None, :]
        queries = tl.load(
            query_ptr
            + (token * stride_query_row + query_head * stride_query_head)[:, None]
            + dim[None, :] * stride_query_col,
            mask=inside,
            other=0.0,
        ).to(out_ptr.dtype.element_ty)
        position = context + row
        tail_row = tl.where(live, row - (rows - tail), -1)
        bits_row_ptr = bits_ptr + slot * stride_bits_slot + tail_row * stride_bits_node
        context_end = context + rows - tail
        end = context + tl.minimum(block_row + BLOCK_Q, rows)
        skipped = first_tile(context, bundle_row, rows, WINDOW, MAX_TAIL, BLOCK_N)
        # earlier q-blocks of a bundle may see a few tiles less than its last
        tiles = (end + BLOCK_N - 1) // BLOCK_N - skipped
        finish = tl.minimum(stop - start, tiles)
        # the teams that have the first and the last tile
        first_team = start // chunk
        last_team = (start + tiles - 1) // chunk
        cut = (first_team != last_team) & (begin < finish)
        # Only one q-block can begin in a run and end after it: its counter is that program's.
        counter_ptr = arrived_ptr + program - (team - first_team) * members
        # every row of the block sees all of the tiles before this one
        unmasked = tl.minimum(context + block_row + 1, context_end) // BLOCK_N
        # and the windows of all begin before this one
        inner = (tl.maximum(end - WINDOW, 0) + BLOCK_N - 1) // BLOCK_N
        depths_row_ptr = depths_ptr + slot * stride_depths if WINDOW else depths_ptr

        accumulator = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        norm = tl.zeros([BLOCK_M], tl.float32)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        request_table_ptr = table_ptr + request.to(tl.int64) * stride_table
        kv_head_ptr = kv_ptr + head.to(tl.int64) * STRIDE_KV_HEAD
        # The pages of a tile are read one tile ahead, so that the addresses are there in time.
        # Columns are unsigned, so that dividing by a power of two is one instruction. The addresses
        # stand between two products, which wait for them.
        column = ((skipped + begin) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.uint32)
        page = tl.load(request_table_ptr + column // PAGE, mask=column < end, other=0)
        for t in tl.range(skipped + begin, skipped + finish, num_stages=STAGES):
            column = (t * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.uint32)
            row_offset = page.to(tl.uint32).to(tl.uint64) * STRIDE_KV_BLOCK
            row_offset += (column % PAGE) * STRIDE_KV_ROW
            key_ptr = kv_head_ptr + row_offset[:, None] + dim[None, :] * STRIDE_KV_COL
            # Past the end lies anything, even what is no number. Scores there are hidden, so keys
            # may be; but it must not be added to the result, not even with the weight 0.
            present = (column < end)[:, None]
            if DIM == BLOCK_D:
                keys = tl.load(key_ptr)
            else:
                keys = tl.load(key_ptr, mask=(dim < DIM)[None, :], other=0.0)
                present &= (dim < DIM)[None, :]
            values = tl.load(key_ptr + DIM * STRIDE_KV_COL, mask=present, other=0.0)
            following = column + BLOCK_N
            page = tl.load(request_table_ptr + following // PAGE, mask=following < end, other=0)
            scores = tl.dot(queries, tl.trans(keys.to(queries.dtype)), input_precision="ieee")
            if SOFTCAP:
                # tanh(x) = 1 - 2 / (1 + exp(2x)); here score_scale has a factor 2 / softcap, and
                # softcap one of log2(e)
                scores = softcap - 2 * softcap / (1 + tl.exp2(scores * score_scale))
            hide = t >= unmasked
            if WINDOW:
                hide |= t < inner
            if hide:
                scores = _hide(
                    scores, column.to(tl.int32), t * BLOCK_N - context_end, end, position, tail_row,
                    bits_row_ptr, stride_bits_word, words, depths_row_ptr, tail, BLOCK_N, WINDOW,
                )  # fmt: skip
            # the scale is applied within the exponent, where a fused multiply-add does it for free
            new_top = tl.maximum(top, tl.max(scores, 1) * exponent_scale)
            # a row that has seen no column yet has no finite maximum
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
            weights = tl.exp2(scores * exponent_scale - base[:, None])
            rescale = tl.exp2(top - base)
            norm = norm * rescale + tl.sum(weights, 1)
            accumulator = tl.dot(
                weights.to(queries.dtype),
                values.to(queries.dtype),
                accumulator * rescale[:, None],
                input_precision="ieee",
            )
            top = new_top

        complete = (first_team == last_team) & (begin < finish)
        if cut:
            # A run cuts at most two q-blocks: one that began before it, one that ends after it.
            # Left by the last one too: who that is only the atomic below may say, since a counter
            # that others still write may look different to each warp, and warps must not part.
            place = (program * 2 + (begin == 0).to(tl.int32)).to(tl.int64)
            stats_ptr = partial_stats_ptr + place * 2 * BLOCK_M + packed
            tl.store(stats_ptr, top, mask=live)
            tl.store(stats_ptr + BLOCK_M, norm, mask=live)
            into_ptr = partial_ptr + place * BLOCK_M * BLOCK_D + packed[:, None] * BLOCK_D
            tl.store(into_ptr + dim[None, :], accumulator, mask=live[:, None])
            # all threads' stores come before the one thread's release
            tl.debug_barrier()
            before = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
            complete = before == last_team - first_team
            if complete:
                tl.store(counter_ptr, 0)
                own, own_norm, own_top = accumulator, norm, top
                accumulator = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
                norm = tl.zeros([BLOCK_M], tl.float32)
                top = tl.full([BLOCK_M], float("-inf"), tl.float32)
                for p in tl.range(first_team, last_team + 1, num_stages=MERGE_STAGES):
                    place = (program - (team - p) * members) * 2 + (p == first_team).to(tl.int32)
                    place = place.to(tl.int64)
                    other = tl.where(p == team, False, live)
                    stats_ptr = partial_stats_ptr + place * 2 * BLOCK_M + packed
                    part_top = tl.load(stats_ptr, mask=other, other=0.0, cache_modifier=".cg")
                    part_norm = tl.load(
                        stats_ptr + BLOCK_M, mask=other, other=0.0, cache_modifier=".cg"
                    )
                    from_ptr = partial_ptr + place * BLOCK_M * BLOCK_D + packed[:, None] * BLOCK_D
                    part = tl.load(
                        from_ptr + dim[None, :], mask=other[:, None], other=0.0,
                        cache_modifier=".cg",
                    )  # fmt: skip
                    part_top = tl.where(p == team, own_top, part_top)
                    part_norm = tl.where(p == team, own_norm, part_norm)
                    part = tl.where(p == team, own, part)
                    new_top = tl.maximum(top, part_top)
                    base = tl.where(new_top == float("-inf"), 0.0, new_top)
                    old_weight = tl.exp2(top - base)
                    part_weight = tl.exp2(part_top - base)
                    accumulator = accumulator * old_weight[:, None] + part * part_weight[:, None]
                    norm = norm * old_weight + part_norm * part_weight
                    top = new_top
        if complete:
            if sinks_ptr is not None:
                # the row has seen itself, so that its maximum is finite
                sink = tl.load(sinks_ptr + query_head, mask=live, other=0.0) * LOG2_E
                new_top = tl.maximum(top, sink)
                accumulator *= tl.exp2(top - new_top)[:, None]
                norm = norm * tl.exp2(top - new_top) + tl.exp2(sink - new_top)
            result = accumulator / tl.where(live, norm, 1.0)[:, None]
            if v_scale_ptr is not None:
                result *= tl.load(v_scale_ptr)
            tl.store(
                out_ptr
                + (token * stride_out_row + query_head * stride_out_head)[:, None]
                + dim[None, :] * stride_out_col,
                result.to(out_ptr.dtype.element_ty),
                mask=inside,
            )
        line = tl.minimum(start + bundle_tiles, stop)
        if line == bundle_start + bundle_tiles * KV_HEADS and line < stop:
            bundle += 1
            request, bundle_row, bundle_start, bundle_tiles, first, rows, context = _bundle(
                bundles_ptr + bundle * BUNDLE_FIELDS, KV_HEADS
            )
