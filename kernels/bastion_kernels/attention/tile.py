# SPDX-License-Identifier: Apache-2.0
"""What the tree-attention kernel does with one tile of the cache: masks, scores and values."""

from __future__ import annotations

from bastion_kernels.triton_or_none import tl, triton


@triton.jit
def bits_from(p_bits, stride_word, start, words, b_tail_row):
    """Bits start .. start + 31 of every row's ancestors, [BLOCK_M] int32; start may be negative."""
    o_w = tl.zeros_like(b_tail_row) + (start >> 5)
    m_low = (b_tail_row >= 0) & (o_w >= 0) & (o_w < words)
    m_high = (b_tail_row >= 0) & (o_w >= -1) & (o_w < words - 1)
    p_low = p_bits + o_w * stride_word
    b_low = tl.load(p_low, mask=m_low, other=0).to(tl.uint32, bitcast=True)
    b_high = tl.load(p_low + stride_word, mask=m_high, other=0)
    b_pair = (b_high.to(tl.int64) << 32) | b_low.to(tl.int64)
    return (b_pair >> (start & 31)).to(tl.int32)


@triton.jit
def _hide(
    b_s, o_n, start, end, b_position, b_tail_row, p_bits, stride_word, words, p_depths,
    tail, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Mask the scores of invisible columns with -inf.

    Args:
        start: the tile's first column, counted from the first column of the tail.
        end: one past the last column visible to the block.
        b_position, b_tail_row: `[BLOCK_M]`, cached row of the query row; its number in the tail,
            negative outside it.
        p_depths: depth of the request's nodes 1, 2, ...; read only with a window.
        tail: rows of the tail.
    """
    m_visible = o_n[None, :] <= b_position[:, None]
    # tail rows look up tail columns in the bits, 32 at a time
    for k in tl.static_range((BLOCK_N + 31) // 32):
        b_bits = bits_from(p_bits, stride_word, start + 32 * k, words, b_tail_row)
        o_lane = tl.arange(0, BLOCK_N) - 32 * k
        m_word = (o_lane >= 0) & (o_lane < 32) & (start + tl.arange(0, BLOCK_N) >= 0)
        m_ancestor = ((b_bits[:, None] >> (o_lane & 31)[None, :]) & 1) != 0
        m_visible = tl.where(m_word[None, :] & (b_tail_row >= 0)[:, None], m_ancestor, m_visible)
    if WINDOW:
        # a node's position is its root's plus its depth
        o_place = start + tl.arange(0, BLOCK_N)
        m_node = (o_place > 0) & (o_place < tail)
        b_depth = tl.load(p_depths + o_place - 1, mask=m_node, other=0)
        b_column_at = tl.where(m_node, o_n - o_place + b_depth, o_n)
        m_node_row = b_tail_row > 0
        b_depth = tl.load(p_depths + b_tail_row - 1, mask=m_node_row, other=0)
        b_row_at = tl.where(m_node_row, b_position - b_tail_row + b_depth, b_position)
        m_visible &= b_row_at[:, None] - b_column_at[None, :] < WINDOW
    # a row always sees itself, so results stay finite even if all bits are 0
    m_visible |= o_n[None, :] == b_position[:, None]
    m_visible &= (o_n < end)[None, :]
    return tl.where(m_visible, b_s, float("-inf"))


@triton.jit
def scores(
    b_q, b_k, o_n, t, unmasked, inner, context_end, end, b_position, b_tail_row, p_bits,
    stride_word, words, p_depths, tail, score_scale, softcap, BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """The scores of tile `t`, -inf where a row does not see a column; capped ones are scaled.

    All rows see all of the tiles before `unmasked` that do not precede `inner`.
    """
    b_s = tl.dot(b_q, tl.trans(b_k.to(b_q.dtype)), input_precision="ieee")
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (1 + exp(2x)); here score_scale has a factor 2 / softcap, and softcap
        # one of log2(e)
        b_s = softcap - 2 * softcap / (1 + tl.exp2(b_s * score_scale))
    hide = t >= unmasked
    if WINDOW:
        hide |= t < inner
    if hide:
        b_s = _hide(
            b_s, o_n.to(tl.int32), t * BLOCK_N - context_end, end, b_position, b_tail_row,
            p_bits, stride_word, words, p_depths, tail, BLOCK_N, WINDOW,
        )  # fmt: skip
    return b_s


@triton.jit
def weights(b_s, b_max, exponent_scale):
    """The tile's weights, the factor of what came before it, and the new maximum."""
    # scaling inside the exponent is free: a fused multiply-add
    b_new_max = tl.maximum(b_max, tl.max(b_s, 1) * exponent_scale)
    # the maximum is -inf while a row has seen no column
    b_base = tl.where(b_new_max == float("-inf"), 0.0, b_new_max)
    b_p = tl.exp2(b_s * exponent_scale - b_base[:, None])
    return b_p, tl.exp2(b_max - b_base), b_new_max


@triton.jit
def add_unbounded(
    b_o,
    b_s,
    p_v,
    p_table,
    o_d,
    first,
    end,
    stride_block,
    stride_row,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Add a tile's NaN and infinite values to the rows that see them, column by column.

    p_v: the values of the head's first row, `[BLOCK_D]`; first: the tile's first column.
    """
    for c in range(BLOCK_N):
        column = first + c
        if column < end:
            place = tl.load(p_table + column // PAGE).to(tl.int64) * stride_block
            place += (column % PAGE) * stride_row
            b_row = tl.load(p_v + place, mask=o_d < DIM, other=0.0).to(tl.float32)
            m_odd = (tl.abs(b_row) < float("inf")) == 0
            if tl.max(m_odd.to(tl.int32), 0) > 0:
                m_here = (tl.arange(0, BLOCK_N) == c)[None, :] & (b_s != float("-inf"))
                m_sees = tl.max(m_here.to(tl.int32), 1) > 0
                b_o += tl.where(m_sees[:, None] & m_odd[None, :], b_row[None, :], 0.0)
    return b_o
