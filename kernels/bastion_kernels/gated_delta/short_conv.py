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

import torch
from torch import Tensor

from bastion_kernels.gated_delta.states import (
    LayerStates,
    check_commits,
    path_length,
)
from bastion_kernels.op import Op, public
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
    channels,
    stride_x,
    stride_weight,
    stride_state,
    stride_state_channel,
    stride_state_col,
    stride_parents,
    stride_out,
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
        m_c = o_c < channels
        x += first * stride_x
        out += first * stride_out
        p_state = state + place * stride_state + o_c * stride_state_channel
        parents += slot * stride_parents
        for start in range(0, rows, BLOCK):
            o_r = start + tl.arange(0, BLOCK)
            m_rc = (o_r < rows)[:, None] & m_c[None, :]
            b_row = o_r
            b_total = tl.zeros([BLOCK, BLOCK_C], tl.float32)
            for t in tl.static_range(TAPS):
                m_inside = m_rc & (b_row >= 0)[:, None]
                b_here = tl.load(
                    x + (b_row * stride_x)[:, None] + o_c[None, :], mask=m_inside, other=0.0
                )
                b_before = tl.load(
                    p_state[None, :] + ((TAPS - 1 + b_row) * stride_state_col)[:, None],
                    mask=m_rc & (b_row < 0)[:, None],
                    other=0.0,
                )
                b_weight = tl.load(weight + o_c * stride_weight + TAPS - 1 - t, mask=m_c, other=0.0)
                b_value = b_here.to(tl.float32) + b_before.to(tl.float32)
                b_total += b_value * b_weight.to(tl.float32)[None, :]
                b_row = tl.where(b_row >= 0, _above(b_row, rows - tail, tail, parents), b_row - 1)
            b_total = b_total / (1 + tl.exp(-b_total))
            tl.store(
                out + (o_r * stride_out)[:, None] + o_c[None, :],
                b_total.to(out.dtype.element_ty),
                mask=m_rc,
            )


@dataclass(slots=True)
class ShortConvTree(Op):
    """Convolve every row of the step with the rows above it. The state is not changed."""

    x: Tensor
    """`[T, C]`, contiguous in its last dimension."""
    weight: Tensor
    """`[C, W]`."""
    state: Tensor
    """`[B, C, W - 1]`, any strides, the last inputs of each request, oldest first."""
    state_rows: Tensor
    """`[R]`, the request's row of `state`; -1 = skip this request."""
    query_start_loc: Tensor
    """`[R+1]` int32, first row of each request."""
    tail_lens: Tensor
    """`[R]` int32, rows of the request's tail (root and nodes); 0 = causal only."""
    slots: Tensor
    """`[R]` int64, the request's row of `parents`; -1 = causal only."""
    parents: Tensor
    """`[S, N]` int32, node number of each column's parent."""
    out: Tensor
    """`[T, C]`, written."""

    def check(self) -> None:
        rows, channels = self.x.shape
        self.expect("weight", (channels, None), self.weight.dtype)
        self.expect(
            "state", (None, channels, self.weight.shape[1] - 1), self.state.dtype, strided=True
        )
        self.expect("x", (rows, channels), self.x.dtype)
        self.expect("parents", (None, None), torch.int32)
        self.expect("out", (rows, channels), self.out.dtype)

    def triton(self) -> None:
        channels, taps = self.weight.shape
        _conv_kernel[(self.state_rows.shape[0], triton.cdiv(channels, _BLOCK_C))](
            x=self.x, weight=self.weight, state=self.state, state_rows=self.state_rows,
            query_start_loc=self.query_start_loc, tail_lens=self.tail_lens, slots=self.slots,
            parents=self.parents, out=self.out, channels=channels, stride_x=self.x.stride(0),
            stride_weight=self.weight.stride(0), stride_state=self.state.stride(0),
            stride_state_channel=self.state.stride(1), stride_state_col=self.state.stride(2),
            stride_parents=self.parents.stride(0), stride_out=self.out.stride(0), TAPS=taps,
            BLOCK=_BLOCK, BLOCK_C=_BLOCK_C,
        )  # fmt: skip


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
    channels,
    stride_x_layer,
    stride_x,
    stride_state,
    stride_state_channel,
    stride_state_col,
    stride_state_rows,
    stride_commit,
    stride_into_rows,
    stride_path,
    stride_lengths,
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
    place = tl.load(state_rows + group * stride_state_rows + i_r).to(tl.int64)
    tail = tl.load(cu_num_logits + i_r + 1) - tl.load(cu_num_logits + i_r)
    first = tl.load(query_start_loc + i_r).to(tl.int64)
    root = (tl.load(query_start_loc + i_r + 1) - first).to(tl.int32) - tail
    path += i_r.to(tl.int64) * stride_path
    longest = path_length(path, tail, PATH, PATHS)
    o_c = i_b * BLOCK_C + tl.arange(0, BLOCK_C)
    o_k = tl.arange(0, KEPT_PAD)
    m_ck = (o_k < KEPT)[None, :] & (o_c < channels)[:, None]
    p_state = tl.load(table + i_l * 2).to(tl.pointer_type(ELEMENT))
    p_state = tl.multiple_of(p_state, ALIGNMENT)
    p_state += o_c[:, None] * stride_state_channel
    x += i_l * stride_x_layer + first * stride_x
    # in order: a later commit may write the state that all of them read
    for i_c in tl.static_range(COMMITS):
        into = tl.load(into_rows + i_c * stride_commit + group * stride_into_rows + i_r)
        length = longest
        if lengths is not None:
            length = tl.minimum(length, tl.load(lengths + i_c * stride_lengths + i_r))
        if (place >= 0) & (into >= 0) & (length > 0):
            # index among the accepted rows; negative = in the state
            b_at = root + length - KEPT + o_k
            b_on_path = tl.load(path + b_at - root, mask=(b_at >= root) & (o_k < KEPT), other=0)
            b_row = tl.where(b_at < root, b_at, root + b_on_path)
            b_x = tl.load(
                x + (b_row * stride_x)[None, :] + o_c[:, None],
                mask=m_ck & (b_at >= 0)[None, :],
                other=0.0,
            ).to(ELEMENT)
            b_old = tl.load(
                p_state + place * stride_state + ((KEPT + b_at) * stride_state_col)[None, :],
                mask=m_ck & (b_at < 0)[None, :],
                other=0.0,
            )
            # all threads must read before any thread writes
            tl.debug_barrier()
            b_kept = tl.where((b_at >= 0)[None, :], b_x, b_old)
            p_into = p_state + into.to(tl.int64) * stride_state
            tl.store(p_into + (o_k * stride_state_col)[None, :], b_kept, mask=m_ck)


@dataclass(slots=True)
class ShortConvCommit(Op):
    """Keep the last inputs of the accepted text in all layers."""

    x: Tensor
    """`[L, T, C]`, the inputs of `short_conv_tree` in the same step, by layer."""
    states: LayerStates
    """The states `[B, C, W - 1]` of the L layers, written."""
    state_rows: Tensor
    """`[G, R]` int32, the request's row of the states in each group of layers; -1 = none."""
    into_rows: Tensor
    """`[C, G, R]` int32, the row that each of C commits writes; -1 = none. The last may write the
    row that all read."""
    query_start_loc: Tensor
    """`[R+1]` int32, first row of each request."""
    cu_num_logits: Tensor
    """`[R+1]` int32, first logits row of each request; its last `cu[r+1] - cu[r]` rows are its
    tail."""
    path: Tensor
    """`[R, depth + 1]` int32, node numbers of the accepted path, -1 past its end; a request whose
    path is empty keeps its state."""
    lengths: Tensor | None = None
    """`[C, R]` int32, entries of the path that each commit follows at most; None: all."""

    def check(self) -> None:
        self.expect("x", (len(self.states.states), None, self.states.first.shape[1]), self.x.dtype)
        check_commits(self)

    def triton(self) -> None:
        _, channels, kept = self.states.first.shape
        reqs, layers = self.path.shape[0], len(self.states.states)
        if reqs == 0:
            return
        _commit_kernel[(reqs, layers, triton.cdiv(channels, _BLOCK_C))](
            x=self.x, table=self.states.table, state_rows=self.state_rows, into_rows=self.into_rows,
            query_start_loc=self.query_start_loc, cu_num_logits=self.cu_num_logits, path=self.path,
            lengths=self.lengths, channels=channels, stride_x_layer=self.x.stride(0),
            stride_x=self.x.stride(1),
            stride_state=self.states.first.stride(0),
            stride_state_channel=self.states.first.stride(1),
            stride_state_col=self.states.first.stride(2),
            stride_state_rows=self.state_rows.stride(0), stride_commit=self.into_rows.stride(0),
            stride_into_rows=self.into_rows.stride(1), stride_path=self.path.stride(0),
            stride_lengths=0 if self.lengths is None else self.lengths.stride(0),
            **self.states.arguments(), PATH=self.path.shape[1],
            PATHS=triton.next_power_of_2(self.path.shape[1]), COMMITS=self.into_rows.shape[0],
            KEPT=kept, KEPT_PAD=triton.next_power_of_2(kept), BLOCK_C=_BLOCK_C,
        )  # fmt: skip


short_conv_commit = public(ShortConvCommit, cpu="bastion_kernels.cpu.gated_delta")
