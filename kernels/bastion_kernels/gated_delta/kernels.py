# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of the gated delta rule over trees; the formulas are in `recurrence`."""

from __future__ import annotations

from bastion_kernels.attention.tile import bits_from
from bastion_kernels.gated_delta.states import path_length
from bastion_kernels.triton_or_none import tl, triton


@triton.jit
def _seen(o_r, begin, rows, tail, b_tail_row, p_bits, stride_word, words, BLOCK: tl.constexpr):
    """`[BLOCK, BLOCK]` bool: the rows begin .. begin + BLOCK - 1 that each row sees."""
    o_lane = tl.arange(0, BLOCK)
    o_c = begin + o_lane
    m_seen = o_c[None, :] <= o_r[:, None]
    start = begin - (rows - tail)
    b_bits = bits_from(p_bits, stride_word, start, words, b_tail_row)
    m_ancestor = ((b_bits[:, None] >> o_lane[None, :]) & 1) != 0
    m_tail = (start + o_lane >= 0)[None, :] & (b_tail_row >= 0)[:, None]
    m_seen = tl.where(m_tail, m_ancestor, m_seen) | (o_c[None, :] == o_r[:, None])
    return m_seen & (o_c < rows)[None, :]


@triton.jit
def _product(b_weight, b_u, m_seen, b_into):
    """`b_into + b_weight @ b_u`; NaN in rows that see a non-finite value, which others ignore."""
    m_lost = (tl.abs(b_u) < float("inf")) == 0
    b_lost = tl.dot(m_seen.to(tl.float16), m_lost.to(tl.float16))
    b_u = tl.where(m_lost, 0.0, b_u)
    b_into = tl.dot(tl.where(m_seen, b_weight, 0.0), b_u, b_into, input_precision="ieee")
    return tl.where(b_lost > 0, float("nan"), b_into)


@triton.jit
def _rows(p_base, o_r, stride, m_r, begin, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load `[BLOCK, BLOCK_D]` columns of some rows, from column `begin` on, as fp32."""
    o_d = begin + tl.arange(0, BLOCK_D)
    p_at = p_base + (o_r * stride)[:, None] + o_d[None, :]
    return tl.load(p_at, mask=m_r[:, None] & (o_d < DIM)[None, :], other=0.0).to(tl.float32)


@triton.jit
def gated_delta_tree_kernel(
    # [T, Hk, DIM] each
    query,
    key,
    # [T, HEADS, WIDTH]
    value,
    # [T, HEADS] float32 each
    gate,
    beta,
    # [B, HEADS, DIM, WIDTH]
    state,
    # [R], [R+1] int32, [R] int32, [R] int64
    state_rows,
    query_start_loc,
    tail_lens,
    slots,
    # [S, N+1, W] int32
    ancestor_bits,
    # [T, HEADS, WIDTH] (written)
    out,
    # [T, HEADS, WIDTH] float32 and [T, HEADS] float64, contiguous (written)
    updates,
    decays,
    scale,
    stride_query_t,
    stride_query_h,
    stride_key_t,
    stride_key_h,
    stride_value_t,
    stride_value_h,
    stride_gate_t,
    stride_beta_t,
    stride_state_b,
    stride_state_h,
    stride_state_d,
    stride_state_w,
    stride_ancestor_bits_s,
    stride_ancestor_bits_n,
    stride_ancestor_bits_w,
    W,
    stride_out_t,
    stride_out_h,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK_V columns of one head of one request. Grid: (R, HEADS, ceil(WIDTH / BLOCK_V)).

    Rows are solved BLOCK at a time; u of earlier blocks is read back from memory. All programs of a
    head write the same G, because each needs that of the earlier rows.
    """
    i_r, i_h = tl.program_id(0), tl.program_id(1)
    place = tl.load(state_rows + i_r).to(tl.int64)
    if place >= 0:
        first = tl.load(query_start_loc + i_r).to(tl.int64)
        rows = (tl.load(query_start_loc + i_r + 1) - first).to(tl.int32)
        slot = tl.load(slots + i_r)
        tail = tl.where(slot >= 0, tl.load(tail_lens + i_r), 0)
        o_lane = tl.arange(0, BLOCK)
        i_v = tl.program_id(2)
        o_v = i_v * BLOCK_V + tl.arange(0, BLOCK_V)
        state += place * stride_state_b + i_h * stride_state_h
        query += first * stride_query_t + i_h // GROUP * stride_query_h
        key += first * stride_key_t + i_h // GROUP * stride_key_h
        value += first * stride_value_t + i_h * stride_value_h
        out += first * stride_out_t + i_h * stride_out_h
        gate += first * stride_gate_t + i_h
        beta += first * stride_beta_t + i_h
        updates += (first * HEADS + i_h) * WIDTH
        decays += first * HEADS + i_h
        ancestor_bits += slot * stride_ancestor_bits_s
        for start in range(0, rows, BLOCK):
            o_r = start + o_lane
            m_r = o_r < rows
            b_tail_row = tl.where(m_r, o_r - (rows - tail), -1)
            p_bits = ancestor_bits + b_tail_row * stride_ancestor_bits_n
            m_rv = m_r[:, None] & (o_v < WIDTH)[None, :]
            b_decay = tl.zeros([BLOCK], tl.float64)
            for begin in range(0, start + BLOCK, BLOCK):
                m_seen = _seen(
                    o_r, begin, rows, tail, b_tail_row, p_bits, stride_ancestor_bits_w, W, BLOCK
                )
                o_other = begin + o_lane
                b_gate = tl.load(gate + o_other * stride_gate_t, mask=o_other < rows, other=0.0)
                b_decay += tl.sum(tl.where(m_seen, b_gate[None, :], 0.0).to(tl.float64), 1)
            tl.store(decays + o_r * HEADS, b_decay, mask=m_r)
            b_v = tl.load(
                value + (o_r * stride_value_t)[:, None] + o_v[None, :],
                mask=m_rv,
                other=0.0,
            ).to(tl.float32)
            b_beta = tl.load(beta + o_r * stride_beta_t, mask=m_r, other=0.0)
            # in parts, because the whole dimension would not fit the registers
            b_retrieved = tl.zeros([BLOCK, BLOCK_V], tl.float32)
            b_o = tl.zeros([BLOCK, BLOCK_V], tl.float32)
            b_kk = tl.zeros([BLOCK, BLOCK], tl.float32)
            b_qk = tl.zeros([BLOCK, BLOCK], tl.float32)
            for part in range(0, DIM, BLOCK_D):
                b_q = _rows(query, o_r, stride_query_t, m_r, part, DIM, BLOCK_D)
                b_k = _rows(key, o_r, stride_key_t, m_r, part, DIM, BLOCK_D)
                o_d = part + tl.arange(0, BLOCK_D)
                b_state = tl.load(
                    state + o_d[:, None] * stride_state_d + o_v[None, :] * stride_state_w,
                    mask=(o_d < DIM)[:, None] & (o_v < WIDTH)[None, :],
                    other=0.0,
                ).to(tl.float32)
                b_o = tl.dot(b_q, b_state, b_o, input_precision="ieee")
                b_retrieved = tl.dot(b_k, b_state, b_retrieved, input_precision="ieee")
                b_kk = tl.dot(b_k, tl.trans(b_k), b_kk, input_precision="ieee")
                b_qk = tl.dot(b_q, tl.trans(b_k), b_qk, input_precision="ieee")
            b_own = tl.exp(b_decay.to(tl.float32))[:, None]
            b_o *= b_own
            b_u = b_beta[:, None] * (b_v - b_own * b_retrieved)
            for begin in range(0, start, BLOCK):
                m_seen = _seen(
                    o_r, begin, rows, tail, b_tail_row, p_bits, stride_ancestor_bits_w, W, BLOCK
                )
                o_other = begin + o_lane
                b_other_kk = tl.zeros([BLOCK, BLOCK], tl.float32)
                b_other_qk = tl.zeros([BLOCK, BLOCK], tl.float32)
                for part in range(0, DIM, BLOCK_D):
                    b_q = _rows(query, o_r, stride_query_t, m_r, part, DIM, BLOCK_D)
                    b_k = _rows(key, o_r, stride_key_t, m_r, part, DIM, BLOCK_D)
                    b_other_k = _rows(
                        key, o_other, stride_key_t, o_other < rows, part, DIM, BLOCK_D
                    )
                    b_other_kk = tl.dot(
                        b_k, tl.trans(b_other_k), b_other_kk, input_precision="ieee"
                    )
                    b_other_qk = tl.dot(
                        b_q, tl.trans(b_other_k), b_other_qk, input_precision="ieee"
                    )
                b_other_u = tl.load(
                    updates + (o_other * HEADS * WIDTH)[:, None] + o_v[None, :],
                    mask=(o_v < WIDTH)[None, :],
                    other=0.0,
                )
                b_other_decay = tl.load(decays + o_other * HEADS)
                b_between = tl.where(
                    m_seen, b_decay[:, None] - b_other_decay[None, :], float("-inf")
                )
                b_between = tl.exp(b_between.to(tl.float32))
                b_other_kk *= b_between * -b_beta[:, None]
                b_u = _product(b_other_kk, b_other_u, m_seen, b_u)
                b_o = _product(b_other_qk * b_between, b_other_u, m_seen, b_o)
            m_seen = _seen(
                o_r, start, rows, tail, b_tail_row, p_bits, stride_ancestor_bits_w, W, BLOCK
            )
            b_between = tl.where(m_seen, b_decay[:, None] - b_decay[None, :], float("-inf"))
            b_between = tl.exp(b_between.to(tl.float32))
            b_kk *= b_between * b_beta[:, None]
            b_kk = tl.where(m_seen & (o_lane[None, :] < o_lane[:, None]), b_kk, 0.0)
            # forward substitution; 0 * NaN would be NaN
            for i in range(1, BLOCK):
                b_terms = tl.sum(tl.where((o_lane == i)[:, None], b_kk, 0.0), 0)
                b_known = tl.sum(tl.where((b_terms != 0)[:, None], b_terms[:, None] * b_u, 0.0), 0)
                b_u -= tl.where((o_lane == i)[:, None], b_known[None, :], 0.0)
            b_o = _product(b_qk * b_between, b_u, m_seen, b_o)
            tl.store(updates + (o_r * HEADS * WIDTH)[:, None] + o_v[None, :], b_u, mask=m_rv)
            tl.store(
                out + (o_r * stride_out_t)[:, None] + o_v[None, :],
                (b_o * scale).to(out.dtype.element_ty),
                mask=m_rv,
            )
            # the next blocks read what other threads stored
            tl.debug_barrier()


@triton.jit
def gated_delta_commit_kernel(
    # [L, T, Hk, DIM], [L, T, HEADS, WIDTH] float32, [L, T, HEADS] float64
    key,
    updates,
    decays,
    # [L, 2] int64: address of each layer's [B, HEADS, DIM, WIDTH] (written), and its group
    table,
    # [G, R], [COMMITS, G, R], [R+1] int32 each, [R, PATH] int32, [COMMITS, R] int32 or None
    state_rows,
    into_rows,
    query_start_loc,
    cu_num_logits,
    path,
    lengths,
    stride_key_l,
    stride_key_t,
    stride_key_h,
    stride_updates_l,
    stride_decays_l,
    stride_state_b,
    stride_state_h,
    stride_state_d,
    stride_state_w,
    stride_state_rows_g,
    stride_into_rows_c,
    stride_into_rows_g,
    stride_path_r,
    stride_lengths_c,
    ELEMENT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PATH: tl.constexpr,
    PATHS: tl.constexpr,
    COMMITS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK_V columns of one head's state. Grid: (R, L * HEADS, ceil(WIDTH / BLOCK_V))."""
    i_r, i_lh = tl.program_id(0), tl.program_id(1)
    i_l, i_h = (i_lh // HEADS).to(tl.int64), i_lh % HEADS
    group = tl.load(table + i_l * 2 + 1)
    place = tl.load(state_rows + group * stride_state_rows_g + i_r).to(tl.int64)
    end = tl.load(cu_num_logits + i_r + 1)
    tail = end - tl.load(cu_num_logits + i_r)
    first = tl.load(query_start_loc + i_r).to(tl.int64)
    # counted from the request's first row
    root = (tl.load(query_start_loc + i_r + 1) - first).to(tl.int32) - tail
    path += i_r.to(tl.int64) * stride_path_r
    longest = path_length(path, tail, PATH, PATHS)
    o_d = tl.arange(0, BLOCK_D)
    i_v = tl.program_id(2)
    o_v = i_v * BLOCK_V + tl.arange(0, BLOCK_V)
    m_state = (o_d < DIM)[:, None] & (o_v < WIDTH)[None, :]
    p_state = tl.load(table + i_l * 2).to(tl.pointer_type(ELEMENT))
    p_state = tl.multiple_of(p_state, ALIGNMENT)
    p_state += i_h * stride_state_h
    p_state += o_d[:, None] * stride_state_d + o_v[None, :] * stride_state_w
    key += i_l * stride_key_l + first * stride_key_t + i_h // GROUP * stride_key_h
    updates += i_l * stride_updates_l + (first * HEADS + i_h) * WIDTH
    decays += i_l * stride_decays_l + first * HEADS + i_h
    # in order: a later commit may write the state that all of them read
    for i_c in tl.static_range(COMMITS):
        into = tl.load(into_rows + i_c * stride_into_rows_c + group * stride_into_rows_g + i_r)
        length = longest
        if lengths is not None:
            length = tl.minimum(length, tl.load(lengths + i_c * stride_lengths_c + i_r))
        if (place >= 0) & (into >= 0) & (length > 0):
            final = tl.load(decays + (root + tl.load(path + length - 1)) * HEADS)
            b_state = tl.load(p_state + place * stride_state_b, mask=m_state, other=0.0)
            b_state = b_state.to(tl.float32) * tl.exp(final.to(tl.float32))
            for start in range(0, root + length, BLOCK):
                o_r = start + tl.arange(0, BLOCK)
                m_r = o_r < root + length
                b_on_path = tl.load(path + o_r - root, mask=m_r & (o_r >= root), other=0)
                b_row = tl.where(o_r < root, o_r, root + b_on_path)
                b_k = tl.load(
                    key + (b_row * stride_key_t)[:, None] + o_d[None, :],
                    mask=m_r[:, None] & (o_d < DIM)[None, :],
                    other=0.0,
                ).to(tl.float32)
                b_u = tl.load(
                    updates + (b_row * HEADS * WIDTH)[:, None] + o_v[None, :],
                    mask=m_r[:, None] & (o_v < WIDTH)[None, :],
                    other=0.0,
                )
                b_decay = tl.load(decays + b_row * HEADS, mask=m_r, other=0.0)
                b_weight = tl.where(m_r, tl.exp((final - b_decay).to(tl.float32)), 0.0)
                b_state += tl.dot(tl.trans(b_k), b_u * b_weight[:, None], input_precision="ieee")
            p_into = p_state + into.to(tl.int64) * stride_state_b
            tl.store(p_into, b_state.to(ELEMENT), mask=m_state)
