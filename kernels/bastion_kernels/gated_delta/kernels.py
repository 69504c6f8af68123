# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of the gated delta rule over trees; the formulas are in `gated_delta`."""

from __future__ import annotations

from bastion_kernels.attention.kernels import bits_from
from bastion_kernels.triton_or_none import tl, triton

__all__ = ["gated_delta_commit_kernel", "gated_delta_tree_kernel"]


@triton.jit
def _seen(row, begin, rows, tail, tail_row, bits_row_ptr, stride_word, words, BLOCK: tl.constexpr):
    """`[BLOCK, BLOCK]` bool: which of the rows begin .. begin + BLOCK - 1 each row sees."""
    lane = tl.arange(0, BLOCK)
    column = begin + lane
    seen = column[None, :] <= row[:, None]
    start = begin - (rows - tail)
    bits = bits_from(bits_row_ptr, stride_word, start, words, tail_row)
    ancestor = ((bits[:, None] >> lane[None, :]) & 1) != 0
    of_tail = (start + lane >= 0)[None, :] & (tail_row >= 0)[:, None]
    seen = tl.where(of_tail, ancestor, seen) | (column[None, :] == row[:, None])
    return seen & (column < rows)[None, :]


@triton.jit
def _rows(pointer, row, stride, live, begin, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """`[BLOCK, BLOCK_D]` fp32: numbers begin .. of some rows."""
    dim = begin + tl.arange(0, BLOCK_D)
    at = pointer + (row * stride)[:, None] + dim[None, :]
    return tl.load(at, mask=live[:, None] & (dim < DIM)[None, :], other=0.0).to(tl.float32)


@triton.jit
def gated_delta_tree_kernel(
    # [T, Hk, DIM] each
    query_ptr,
    key_ptr,
    # [T, HEADS, WIDTH]
    value_ptr,
    # [T, HEADS] float32 each
    gate_ptr,
    beta_ptr,
    # [B, HEADS, DIM, WIDTH]
    state_ptr,
    # [R], [R+1] int32, [R] int32, [R] int64
    state_rows_ptr,
    query_start_loc_ptr,
    tail_lens_ptr,
    slots_ptr,
    # [S, N+1, W] int32
    bits_ptr,
    # [T, HEADS, WIDTH] (written)
    out_ptr,
    # [T, HEADS, WIDTH] float32 and [T, HEADS] float64, contiguous (written)
    updates_ptr,
    decays_ptr,
    scale,
    stride_query_row,
    stride_query_head,
    stride_key_row,
    stride_key_head,
    stride_value_row,
    stride_value_head,
    stride_gate,
    stride_beta,
    stride_state,
    stride_state_head,
    stride_state_dim,
    stride_state_col,
    stride_bits_slot,
    stride_bits_node,
    stride_bits_word,
    words,
    stride_out_row,
    stride_out_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK_V columns of one head of one request. Grid: (R, HEADS, ceil(WIDTH / BLOCK_V)).

    Rows are solved BLOCK at a time; earlier blocks' u come back from memory. Every program writes
    the same G, as each needs those of the rows before.
    """
    request, head = tl.program_id(0), tl.program_id(1)
    place = tl.load(state_rows_ptr + request).to(tl.int64)
    if place >= 0:
        first = tl.load(query_start_loc_ptr + request).to(tl.int64)
        rows = (tl.load(query_start_loc_ptr + request + 1) - first).to(tl.int32)
        slot = tl.load(slots_ptr + request)
        tail = tl.where(slot >= 0, tl.load(tail_lens_ptr + request), 0)
        lane = tl.arange(0, BLOCK)
        column = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
        state_ptr += place * stride_state + head * stride_state_head
        query_ptr += first * stride_query_row + head // GROUP * stride_query_head
        key_ptr += first * stride_key_row + head // GROUP * stride_key_head
        value_ptr += first * stride_value_row + head * stride_value_head
        out_ptr += first * stride_out_row + head * stride_out_head
        gate_ptr += first * stride_gate + head
        beta_ptr += first * stride_beta + head
        updates_ptr += (first * HEADS + head) * WIDTH
        decays_ptr += first * HEADS + head
        bits_ptr += slot * stride_bits_slot
        for start in range(0, rows, BLOCK):
            row = start + lane
            live = row < rows
            tail_row = tl.where(live, row - (rows - tail), -1)
            bits_row_ptr = bits_ptr + tail_row * stride_bits_node
            by_column = live[:, None] & (column < WIDTH)[None, :]
            decay = tl.zeros([BLOCK], tl.float64)
            for begin in range(0, start + BLOCK, BLOCK):
                seen = _seen(
                    row, begin, rows, tail, tail_row, bits_row_ptr, stride_bits_word, words, BLOCK
                )
                other = begin + lane
                gate = tl.load(gate_ptr + other * stride_gate, mask=other < rows, other=0.0)
                decay += tl.sum(tl.where(seen, gate[None, :], 0.0).to(tl.float64), 1)
            tl.store(decays_ptr + row * HEADS, decay, mask=live)
            value = tl.load(
                value_ptr + (row * stride_value_row)[:, None] + column[None, :],
                mask=by_column,
                other=0.0,
            ).to(tl.float32)
            beta = tl.load(beta_ptr + row * stride_beta, mask=live, other=0.0)
            # In parts of the dimension, because all of it would not fit the registers.
            retrieved = tl.zeros([BLOCK, BLOCK_V], tl.float32)
            mixed = tl.zeros([BLOCK, BLOCK_V], tl.float32)
            key_key = tl.zeros([BLOCK, BLOCK], tl.float32)
            query_key = tl.zeros([BLOCK, BLOCK], tl.float32)
            for part in range(0, DIM, BLOCK_D):
                query = _rows(query_ptr, row, stride_query_row, live, part, DIM, BLOCK_D)
                key = _rows(key_ptr, row, stride_key_row, live, part, DIM, BLOCK_D)
                dim = part + tl.arange(0, BLOCK_D)
                state = tl.load(
                    state_ptr
                    + dim[:, None] * stride_state_dim
                    + column[None, :] * stride_state_col,
                    mask=(dim < DIM)[:, None] & (column < WIDTH)[None, :],
                    other=0.0,
                ).to(tl.float32)
                mixed = tl.dot(query, state, mixed, input_precision="ieee")
                retrieved = tl.dot(key, state, retrieved, input_precision="ieee")
                key_key = tl.dot(key, tl.trans(key), key_key, input_precision="ieee")
                query_key = tl.dot(query, tl.trans(key), query_key, input_precision="ieee")
            own = tl.exp(decay.to(tl.float32))[:, None]
            mixed *= own
            update = beta[:, None] * (value - own * retrieved)
            for begin in range(0, start, BLOCK):
                seen = _seen(
                    row, begin, rows, tail, tail_row, bits_row_ptr, stride_bits_word, words, BLOCK
                )
                other = begin + lane
                by_key = tl.zeros([BLOCK, BLOCK], tl.float32)
                by_query = tl.zeros([BLOCK, BLOCK], tl.float32)
                for part in range(0, DIM, BLOCK_D):
                    query = _rows(query_ptr, row, stride_query_row, live, part, DIM, BLOCK_D)
                    key = _rows(key_ptr, row, stride_key_row, live, part, DIM, BLOCK_D)
                    above = _rows(key_ptr, other, stride_key_row, other < rows, part, DIM, BLOCK_D)
                    by_key = tl.dot(key, tl.trans(above), by_key, input_precision="ieee")
                    by_query = tl.dot(query, tl.trans(above), by_query, input_precision="ieee")
                other_update = tl.load(
                    updates_ptr + (other * HEADS * WIDTH)[:, None] + column[None, :],
                    mask=(column < WIDTH)[None, :],
                    other=0.0,
                )
                other_decay = tl.load(decays_ptr + other * HEADS)
                between = tl.where(seen, decay[:, None] - other_decay[None, :], float("-inf"))
                between = tl.exp(between.to(tl.float32))
                by_key *= between * beta[:, None]
                update -= tl.dot(by_key, other_update, input_precision="ieee")
                mixed = tl.dot(by_query * between, other_update, mixed, input_precision="ieee")
            seen = _seen(
                row, start, rows, tail, tail_row, bits_row_ptr, stride_bits_word, words, BLOCK
            )
            between = tl.where(seen, decay[:, None] - decay[None, :], float("-inf"))
            between = tl.exp(between.to(tl.float32))
            key_key *= between * beta[:, None]
            key_key = tl.where(lane[None, :] < lane[:, None], key_key, 0.0)
            # forward: row i has all terms once the rows before it are done
            for i in range(1, BLOCK):
                terms = tl.sum(tl.where((lane == i)[:, None], key_key, 0.0), 0)
                known = tl.sum(terms[:, None] * update, 0)
                update -= tl.where((lane == i)[:, None], known[None, :], 0.0)
            mixed = tl.dot(query_key * between, update, mixed, input_precision="ieee")
            tl.store(
                updates_ptr + (row * HEADS * WIDTH)[:, None] + column[None, :],
                update,
                mask=by_column,
            )
            tl.store(
                out_ptr + (row * stride_out_row)[:, None] + column[None, :],
                (mixed * scale).to(out_ptr.dtype.element_ty),
                mask=by_column,
            )
            # the next blocks read what other threads wrote
            tl.debug_barrier()


@triton.jit
def gated_delta_commit_kernel(
    # [L, T, Hk, DIM], [L, T, HEADS, WIDTH] float32, [L, T, HEADS] float64
    key_ptr,
    updates_ptr,
    decays_ptr,
    # [L, 2] int64: address of each layer's [B, HEADS, DIM, WIDTH] (written), and its group
    table_ptr,
    # [G, R] each, [R+1] int32 each, [R, PATH] int32
    state_rows_ptr,
    into_rows_ptr,
    query_start_loc_ptr,
    cu_num_logits_ptr,
    path_ptr,
    stride_key_layer,
    stride_key_row,
    stride_key_head,
    stride_updates_layer,
    stride_decays_layer,
    stride_state,
    stride_state_head,
    stride_state_dim,
    stride_state_col,
    stride_state_rows,
    stride_into_rows,
    stride_path,
    ELEMENT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PATH: tl.constexpr,
    PATHS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK_V columns of one head's state. Grid: (R, L * HEADS, ceil(WIDTH / BLOCK_V))."""
    request, head = tl.program_id(0), tl.program_id(1) % HEADS
    layer = (tl.program_id(1) // HEADS).to(tl.int64)
    group = tl.load(table_ptr + layer * 2 + 1)
    place = tl.load(state_rows_ptr + group * stride_state_rows + request).to(tl.int64)
    into = tl.load(into_rows_ptr + group * stride_into_rows + request).to(tl.int64)
    end = tl.load(cu_num_logits_ptr + request + 1)
    tail = end - tl.load(cu_num_logits_ptr + request)
    first = tl.load(query_start_loc_ptr + request).to(tl.int64)
    # counted from the request's first row
    root = (tl.load(query_start_loc_ptr + request + 1) - first).to(tl.int32) - tail
    path_ptr += request.to(tl.int64) * stride_path
    depth = tl.arange(0, PATHS)
    node = tl.load(path_ptr + depth, mask=depth < PATH, other=-1)
    # The path ends at the first entry that is no node.
    length = tl.min(tl.where((node >= 0) & (node < tail), PATHS, depth), 0)
    if (place >= 0) & (into >= 0) & (length > 0):
        dim = tl.arange(0, BLOCK_D)
        column = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
        in_state = (dim < DIM)[:, None] & (column < WIDTH)[None, :]
        state_ptr = tl.load(table_ptr + layer * 2).to(tl.pointer_type(ELEMENT))
        state_ptr = tl.multiple_of(state_ptr, ALIGNMENT)
        state_ptr += head * stride_state_head
        state_ptr += dim[:, None] * stride_state_dim + column[None, :] * stride_state_col
        key_ptr += (
            layer * stride_key_layer + first * stride_key_row + head // GROUP * stride_key_head
        )
        updates_ptr += layer * stride_updates_layer + (first * HEADS + head) * WIDTH
        decays_ptr += layer * stride_decays_layer + first * HEADS + head
        final = tl.load(decays_ptr + (root + tl.load(path_ptr + length - 1)) * HEADS)
        state = tl.load(state_ptr + place * stride_state, mask=in_state, other=0.0).to(tl.float32)
        state *= tl.exp(final.to(tl.float32))
        for start in range(0, root + length, BLOCK):
            at = start + tl.arange(0, BLOCK)
            live = at < root + length
            on_path = tl.load(path_ptr + at - root, mask=live & (at >= root), other=0)
            row = tl.where(at < root, at, root + on_path)
            key = tl.load(
                key_ptr + (row * stride_key_row)[:, None] + dim[None, :],
                mask=live[:, None] & (dim < DIM)[None, :],
                other=0.0,
            ).to(tl.float32)
            update = tl.load(
                updates_ptr + (row * HEADS * WIDTH)[:, None] + column[None, :],
                mask=live[:, None] & (column < WIDTH)[None, :],
                other=0.0,
            )
            decay = tl.load(decays_ptr + row * HEADS, mask=live, other=0.0)
            weight = tl.where(live, tl.exp((final - decay).to(tl.float32)), 0.0)
            state += tl.dot(tl.trans(key), update * weight[:, None], input_precision="ieee")
        tl.store(state_ptr + into * stride_state, state.to(ELEMENT), mask=in_state)
