# SPDX-License-Identifier: Apache-2.0
"""Causal convolution over a few tokens, along the branches of a tree.

With weights w of W taps (the last one the row's own) and x(-1), x(-2), .. the inputs before the
step, kept as a request's state, oldest first:

    out[i] = silu(sum_t w[W - 1 - t] * x(t-th row above i)) for t = 0 .. W - 1

Above a node is its parent, above any other row the row before it. `short_conv_commit` keeps the
last W - 1 inputs of the accepted text.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from bastion_kernels.gated_delta.states import LayerStates, accepted_rows
from bastion_kernels.op import Op, public
from bastion_kernels.triton_or_none import tl, triton

_BLOCK, _BLOCK_C = 16, 128


@triton.jit
def _above(row, root, tail, parents_ptr):
    """The row above each, counted from the request's first; negative = in the state."""
    node = row - root
    of_tail = (node > 0) & (node < tail)
    parent = tl.load(parents_ptr + node - 1, mask=of_tail, other=0)
    return tl.where(of_tail, root + tl.maximum(parent, 0), row - 1)


@triton.jit
def _conv_kernel(
    # [T, C], [C, TAPS], [B, C, TAPS - 1]
    x_ptr,
    weight_ptr,
    state_ptr,
    # [R], [R+1] int32, [R] int32, [R] int64, [S, N] int32
    state_rows_ptr,
    query_start_loc_ptr,
    tail_lens_ptr,
    slots_ptr,
    parents_ptr,
    # [T, C] (written)
    out_ptr,
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
    request = tl.program_id(0)
    place = tl.load(state_rows_ptr + request).to(tl.int64)
    if place >= 0:
        first = tl.load(query_start_loc_ptr + request).to(tl.int64)
        rows = (tl.load(query_start_loc_ptr + request + 1) - first).to(tl.int32)
        slot = tl.load(slots_ptr + request)
        tail = tl.where(slot >= 0, tl.load(tail_lens_ptr + request), 0)
        channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
        mine = channel < channels
        x_ptr += first * stride_x
        out_ptr += first * stride_out
        from_ptr = state_ptr + place * stride_state + channel * stride_state_channel
        parents_ptr += slot * stride_parents
        for start in range(0, rows, BLOCK):
            row = start + tl.arange(0, BLOCK)
            live = (row < rows)[:, None] & mine[None, :]
            at = row
            total = tl.zeros([BLOCK, BLOCK_C], tl.float32)
            for t in tl.static_range(TAPS):
                inside = live & (at >= 0)[:, None]
                here = tl.load(
                    x_ptr + (at * stride_x)[:, None] + channel[None, :], mask=inside, other=0.0
                )
                before = tl.load(
                    from_ptr[None, :] + ((TAPS - 1 + at) * stride_state_col)[:, None],
                    mask=live & (at < 0)[:, None],
                    other=0.0,
                )
                weight = tl.load(
                    weight_ptr + channel * stride_weight + TAPS - 1 - t, mask=mine, other=0.0
                )
                value = here.to(tl.float32) + before.to(tl.float32)
                total += value * weight.to(tl.float32)[None, :]
                at = tl.where(at >= 0, _above(at, rows - tail, tail, parents_ptr), at - 1)
            total = total / (1 + tl.exp(-total))
            tl.store(
                out_ptr + (row * stride_out)[:, None] + channel[None, :],
                total.to(out_ptr.dtype.element_ty),
                mask=live,
            )


@dataclass(slots=True)
class ShortConvTree(Op):
    """Convolve every row of the step with the rows above it. The state is only read.

    Raises:
        ValueError, TypeError: shapes or dtypes do not fit together.
    """

    x: Tensor
    """`[T, C]`, contiguous in its last dimension."""
    weight: Tensor
    """`[C, W]`."""
    state: Tensor
    """`[B, C, W - 1]`, any strides, the last inputs of each request, oldest first."""
    state_rows: Tensor
    """`[R]`, the request's row of `state`; -1 = this request is left alone."""
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

    def reference(self) -> None:
        """One gather of the rows above each row."""
        taps = self.weight.shape[1]
        state_rows, tails = self.state_rows.tolist(), self.tail_lens.tolist()
        slots = self.slots.tolist()
        for r, (first, last) in enumerate(pairwise(self.query_start_loc.tolist())):
            if first == last or state_rows[r] < 0:
                continue
            # the state's columns come first: row i of the step is at taps - 1 + i
            above = torch.arange(taps - 2, taps - 2 + last - first, device=self.x.device)
            tail = tails[r] if slots[r] >= 0 else 0
            if tail > 1:
                root = last - first - tail
                above[root + 1 :] = (
                    taps - 1 + root + self.parents[slots[r], : tail - 1].clamp(min=0)
                )
            above = torch.cat([torch.arange(-1, taps - 2, device=self.x.device), above])
            inputs = torch.cat([self.state[state_rows[r]].float().T, self.x[first:last].float()])
            row = torch.arange(taps - 1, taps - 1 + last - first, device=self.x.device)
            total = torch.zeros_like(inputs[taps - 1 :])
            for tap in range(taps - 1, -1, -1):
                total += inputs[row] * self.weight[:, tap].float()
                row = above[row]
            self.out[first:last] = torch.nn.functional.silu(total).to(self.out.dtype)

    def triton(self) -> None:
        """Requests and channels in parallel."""
        channels, taps = self.weight.shape
        _conv_kernel[(self.state_rows.shape[0], triton.cdiv(channels, _BLOCK_C))](
            self.x, self.weight, self.state, self.state_rows, self.query_start_loc, self.tail_lens,
            self.slots, self.parents, self.out, channels, self.x.stride(0), self.weight.stride(0),
            *self.state.stride(), self.parents.stride(0), self.out.stride(0), TAPS=taps,
            BLOCK=_BLOCK, BLOCK_C=_BLOCK_C,
        )  # fmt: skip


short_conv_tree = public(ShortConvTree)


@triton.jit
def _commit_kernel(
    # [L, T, C]
    x_ptr,
    # [L, 2] int64: address of each layer's [B, C, KEPT] (written), and its group
    table_ptr,
    # [G, R] each, [R+1] int32 each, [R, PATH] int32
    state_rows_ptr,
    into_rows_ptr,
    query_start_loc_ptr,
    cu_num_logits_ptr,
    path_ptr,
    channels,
    stride_x_layer,
    stride_x,
    stride_state,
    stride_state_channel,
    stride_state_col,
    stride_state_rows,
    stride_into_rows,
    stride_path,
    ELEMENT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PATH: tl.constexpr,
    PATHS: tl.constexpr,
    KEPT: tl.constexpr,
    KEPT_PAD: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """BLOCK_C channels of one request. Grid: (R, L, ceil(C / BLOCK_C))."""
    request, layer = tl.program_id(0), tl.program_id(1).to(tl.int64)
    group = tl.load(table_ptr + layer * 2 + 1)
    place = tl.load(state_rows_ptr + group * stride_state_rows + request).to(tl.int64)
    into = tl.load(into_rows_ptr + group * stride_into_rows + request).to(tl.int64)
    tail = tl.load(cu_num_logits_ptr + request + 1) - tl.load(cu_num_logits_ptr + request)
    first = tl.load(query_start_loc_ptr + request).to(tl.int64)
    root = (tl.load(query_start_loc_ptr + request + 1) - first).to(tl.int32) - tail
    path_ptr += request.to(tl.int64) * stride_path
    depth = tl.arange(0, PATHS)
    node = tl.load(path_ptr + depth, mask=depth < PATH, other=-1)
    length = tl.min(tl.where((node >= 0) & (node < tail), PATHS, depth), 0)
    if (place >= 0) & (into >= 0) & (length > 0):
        channel = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
        column = tl.arange(0, KEPT_PAD)
        live = (column < KEPT)[None, :] & (channel < channels)[:, None]
        # of the accepted rows; negative = of what the state has
        at = root + length - KEPT + column
        on_path = tl.load(path_ptr + at - root, mask=(at >= root) & (column < KEPT), other=0)
        row = tl.where(at < root, at, root + on_path)
        state_ptr = tl.load(table_ptr + layer * 2).to(tl.pointer_type(ELEMENT))
        state_ptr = tl.multiple_of(state_ptr, ALIGNMENT)
        x_ptr += layer * stride_x_layer
        state_ptr += channel[:, None] * stride_state_channel
        x = tl.load(
            x_ptr + first * stride_x + (row * stride_x)[None, :] + channel[:, None],
            mask=live & (at >= 0)[None, :],
            other=0.0,
        ).to(ELEMENT)
        old = tl.load(
            state_ptr + place * stride_state + ((KEPT + at) * stride_state_col)[None, :],
            mask=live & (at < 0)[None, :],
            other=0.0,
        )
        # every thread's reads come before any thread's writes
        tl.debug_barrier()
        kept = tl.where((at >= 0)[None, :], x, old)
        into_ptr = state_ptr + into * stride_state
        tl.store(into_ptr + (column * stride_state_col)[None, :], kept, mask=live)


@dataclass(slots=True)
class ShortConvCommit(Op):
    """Keep the last inputs of the accepted text in all layers.

    Raises:
        ValueError, TypeError: shapes or dtypes do not fit together.
    """

    x: Tensor
    """`[L, T, C]`, the inputs of `short_conv_tree` in the same step, by layer."""
    states: LayerStates
    """The states `[B, C, W - 1]` of the L layers, written."""
    state_rows: Tensor
    """`[G, R]` integer, the request's row of the states in each group of layers; -1 = none."""
    into_rows: Tensor
    """`[G, R]` integer, the row to write; -1 = none. It may be the row that is read."""
    query_start_loc: Tensor
    """`[R+1]` int32, first row of each request."""
    cu_num_logits: Tensor
    """`[R+1]` int32, first logits row of each request; its last `cu[r+1] - cu[r]` rows are its
    tail."""
    path: Tensor
    """`[R, D+1]` int32, node numbers of the accepted path, -1 past its end; a request whose path is
    empty keeps its state."""

    def check(self) -> None:
        reqs = self.path.shape[0]
        self.expect("x", (len(self.states.states), None, self.states.first.shape[1]), self.x.dtype)
        for name in ("state_rows", "into_rows"):
            self.expect(name, (None, reqs), torch.int32, torch.int64)
        self.expect("query_start_loc", (reqs + 1,), torch.int32)
        self.expect("cu_num_logits", (reqs + 1,), torch.int32)
        self.expect("path", (reqs, None), torch.int32)

    def reference(self) -> None:
        """Request by request."""
        where = (self.into_rows, self.query_start_loc, self.cu_num_logits, self.path)
        for layer, state, into, rows in accepted_rows(self.states, self.state_rows, *where):
            inputs = torch.cat([state.T, self.x[layer, rows].to(state.dtype)])
            into.copy_(inputs[-state.shape[1] :].T)

    def triton(self) -> None:
        """Requests and channels in parallel."""
        _, channels, kept = self.states.first.shape
        reqs, layers = self.path.shape[0], len(self.states.states)
        if reqs == 0:
            return
        _commit_kernel[(reqs, layers, triton.cdiv(channels, _BLOCK_C))](
            self.x, self.states.table, self.state_rows, self.into_rows, self.query_start_loc,
            self.cu_num_logits, self.path, channels, *self.x.stride()[:2],
            *self.states.first.stride(), self.state_rows.stride(0), self.into_rows.stride(0),
            self.path.stride(0), **self.states.arguments(),
            PATH=self.path.shape[1], PATHS=triton.next_power_of_2(self.path.shape[1]), KEPT=kept,
            KEPT_PAD=triton.next_power_of_2(kept), BLOCK_C=_BLOCK_C,
        )  # fmt: skip


short_conv_commit = public(ShortConvCommit, cpu="bastion_kernels.cpu.gated_delta")
