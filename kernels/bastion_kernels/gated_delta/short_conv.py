# SPDX-License-Identifier: Apache-2.0
"""Causal convolution over a few tokens, along the branches of a tree.

With weights w of W taps (the last is for the row itself) and the inputs x(-1), x(-2), .. before the
step, which are the request's state, oldest first:

    out[i] = silu(sum_t w[W - 1 - t] * x(t-th row above i)) for t = 0 .. W - 1

The row above a node is its parent; above any other row it is the row before. `short_conv_commit`
keeps the last W - 1 inputs of the accepted text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from bastion_kernels.gated_delta.states import LayerStates, path_length
from bastion_kernels.op import Op, cdiv, padded, public
from bastion_kernels.triton_or_none import tl, triton

_BLOCK, _BLOCK_C = 16, 128


@triton.jit
def _above(b_row, root, tail, p_parents):
    """The row above each row, counted from the request's first; negative = in the state."""
    b_node = b_row - root
    m_tail = (b_node > 0) & (b_node < tail)
    b_parent = tl.load(p_parents + b_node - 1, mask=m_tail, other=0)
    return tl.where(m_tail, root + tl.maximum(b_parent, 0), b_row - 1)


@triton.jit
def _conv_kernel(
    # [T, C], [C, TAPS], [B, C, TAPS - 1]
    x,
    weight,
    state,
    # [R], [R+1] int32, [R] int32, [R] int64, [S, N] int32
    state_rows,
    query_start_loc,
    tail_lens,
    slots,
    parents,
    # [T, C] (written)
    out,
    C,
    stride_x_t,
    stride_weight_c,
    stride_state_b,
    stride_state_c,
    stride_state_k,
    stride_parents_s,
    stride_out_t,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """BLOCK_C channels of one request. Grid: (R, ceil(C / BLOCK_C))."""
    i_r = tl.program_id(0)
    place = tl.load(state_rows + i_r).to(tl.int64)
    if place >= 0:
        first = tl.load(query_start_loc + i_r).to(tl.int64)
        rows = (tl.load(query_start_loc + i_r + 1) - first).to(tl.int32)
        slot = tl.load(slots + i_r)
        tail = tl.where(slot >= 0, tl.load(tail_lens + i_r), 0)
        i_c = tl.program_id(1)
        o_c = i_c * BLOCK_C + tl.arange(0, BLOCK_C)
        m_c = o_c < C
        x += first * stride_x_t
        out += first * stride_out_t
        p_state = state + place * stride_state_b + o_c * stride_state_c
        parents += slot * stride_parents_s
        for start in range(0, rows, BLOCK):
            o_r = start + tl.arange(0, BLOCK)
            m_rc = (o_r < rows)[:, None] & m_c[None, :]
            b_row = o_r
            b_total = tl.zeros([BLOCK, BLOCK_C], tl.float32)
            for t in tl.static_range(TAPS):
                m_inside = m_rc & (b_row >= 0)[:, None]
                b_here = tl.load(
                    x + (b_row * stride_x_t)[:, None] + o_c[None, :], mask=m_inside, other=0.0
                )
                b_before = tl.load(
                    p_state[None, :] + ((TAPS - 1 + b_row) * stride_state_k)[:, None],
                    mask=m_rc & (b_row < 0)[:, None],
                    other=0.0,
                )
                b_weight = tl.load(
                    weight + o_c * stride_weight_c + TAPS - 1 - t, mask=m_c, other=0.0
                )
                b_value = b_here.to(tl.float32) + b_before.to(tl.float32)
                b_total += b_value * b_weight.to(tl.float32)[None, :]
                b_row = tl.where(b_row >= 0, _above(b_row, rows - tail, tail, parents), b_row - 1)
            b_total = b_total / (1 + tl.exp(-b_total))
            tl.store(
                out + (o_r * stride_out_t)[:, None] + o_c[None, :],
                b_total.to(out.dtype.element_ty),
                mask=m_rc,
            )


@dataclass(slots=True)
class ShortConvTree(Op):
    """Convolve every row of the step with the rows above it. The state is not changed."""

    x: Annotated[Tensor, "[T, C]"]
    weight: Annotated[Tensor, "[C, TAPS]"]
    # The last inputs of each request, oldest first.
    state: Annotated[Tensor, "[B, C, TAPS - 1], strided"]
    state_rows: Annotated[Tensor, "[R]"]  # the request's row of `state`; -1 = skip this request
    query_start_loc: Annotated[Tensor, "[R + 1] int32"]  # first row of each request
    # Rows of the request's tail (root and nodes); 0 = causal only.
    tail_lens: Annotated[Tensor, "[*] int32"]
    slots: Annotated[Tensor, "[*] int64"]  # the request's row of `parents`; -1 = causal only
    parents: Annotated[Tensor, "[S, N] int32"]  # node number of each column's parent
    out: Annotated[Tensor, "[T, C]"]  # written

    def triton(self) -> None:
        self.launch(
            _conv_kernel,
            self.state_rows.shape[0],
            cdiv(self.x.shape[1], _BLOCK_C),
            stride_state_k=self.state.stride(2),
            BLOCK=_BLOCK,
            BLOCK_C=_BLOCK_C,
        )


short_conv_tree = public(ShortConvTree)


@triton.jit
def _commit_kernel(
    # [L, T, C]
    x,
    # [L, 2] int64: address of each layer's [B, C, KEPT] (written), and its group
    table,
    # [G, R], [COMMITS, G, R], [R+1] int32 each, [R, PATH] int32, [COMMITS, R] int32 or None
    state_rows,
    into_rows,
    query_start_loc,
    cu_num_logits,
    path,
    lengths,
    C,
    stride_x_l,
    stride_x_t,
    stride_state_b,
    stride_state_c,
    stride_state_k,
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
    KEPT: tl.constexpr,
    KEPT_PAD: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """BLOCK_C channels of one request. Grid: (R, L, ceil(C / BLOCK_C))."""
    i_r, i_l, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    group = tl.load(table + i_l * 2 + 1)
    place = tl.load(state_rows + group * stride_state_rows_g + i_r).to(tl.int64)
    tail = tl.load(cu_num_logits + i_r + 1) - tl.load(cu_num_logits + i_r)
    first = tl.load(query_start_loc + i_r).to(tl.int64)
    root = (tl.load(query_start_loc + i_r + 1) - first).to(tl.int32) - tail
    path += i_r.to(tl.int64) * stride_path_r
    longest = path_length(path, tail, PATH, PATHS)
    o_c = i_b * BLOCK_C + tl.arange(0, BLOCK_C)
    o_k = tl.arange(0, KEPT_PAD)
    m_ck = (o_k < KEPT)[None, :] & (o_c < C)[:, None]
    p_state = tl.load(table + i_l * 2).to(tl.pointer_type(ELEMENT))
    p_state = tl.multiple_of(p_state, ALIGNMENT)
    p_state += o_c[:, None] * stride_state_c
    x += i_l * stride_x_l + first * stride_x_t
    # in order: a later commit may write the state that all of them read
    for i_c in tl.static_range(COMMITS):
        into = tl.load(into_rows + i_c * stride_into_rows_c + group * stride_into_rows_g + i_r)
        length = longest
        if lengths is not None:
            length = tl.minimum(length, tl.load(lengths + i_c * stride_lengths_c + i_r))
        if (place >= 0) & (into >= 0) & (length > 0):
            # index among the accepted rows; negative = in the state
            b_at = root + length - KEPT + o_k
            b_on_path = tl.load(path + b_at - root, mask=(b_at >= root) & (o_k < KEPT), other=0)
            b_row = tl.where(b_at < root, b_at, root + b_on_path)
            b_x = tl.load(
                x + (b_row * stride_x_t)[None, :] + o_c[:, None],
                mask=m_ck & (b_at >= 0)[None, :],
                other=0.0,
            ).to(ELEMENT)
            b_old = tl.load(
                p_state + place * stride_state_b + ((KEPT + b_at) * stride_state_k)[None, :],
                mask=m_ck & (b_at < 0)[None, :],
                other=0.0,
            )
            # all threads must read before any thread writes
            tl.debug_barrier()
            b_kept = tl.where((b_at >= 0)[None, :], b_x, b_old)
            p_into = p_state + into.to(tl.int64) * stride_state_b
            tl.store(p_into + (o_k * stride_state_k)[None, :], b_kept, mask=m_ck)


@dataclass(slots=True)
class ShortConvCommit(Op):
    """Keep the last inputs of the accepted text in all layers."""

    x: Annotated[Tensor, "[L, T, C]"]  # the inputs of `short_conv_tree`, by layer
    states: LayerStates  # the states [B, C, TAPS - 1] of the L layers, written
    # As in `gated_delta_commit`.
    state_rows: Annotated[Tensor, "[G, R] int32"]
    into_rows: Annotated[Tensor, "[COMMITS, G, R] int32"]
    query_start_loc: Annotated[Tensor, "[R + 1] int32"]
    cu_num_logits: Annotated[Tensor, "[R + 1] int32"]
    path: Annotated[Tensor, "[R, PATH] int32"]
    lengths: Annotated[Tensor | None, "[COMMITS, R] int32"] = None

    def check(self) -> None:
        sizes = {"L": len(self.states.states), "C": self.states.first.shape[1]}
        self.check_declared(R=self.path.shape[0], **sizes)

    def triton(self) -> None:
        _, channels, kept = self.states.first.shape
        self.launch(
            _commit_kernel,
            self.path.shape[0],
            len(self.states.states),
            cdiv(channels, _BLOCK_C),
            **self.states.arguments("bck"),
            PATHS=padded(self.path.shape[1]),
            KEPT=kept,
            KEPT_PAD=padded(kept),
            BLOCK_C=_BLOCK_C,
        )


short_conv_commit = public(ShortConvCommit, cpu="bastion_kernels.cpu.gated_delta")
