# SPDX-License-Identifier: Apache-2.0
"""Ancestor bits for attention over a tree, and positions by depth.

    out[s, i] bit j  =  node j is an ancestor of node i, or i itself       (root included: bit 0)
    position(node i) =  position(root) + depth(i)

The bits tell which rows of its request's tail (root and nodes) a node may attend to. The committed
context is visible to all nodes. Positions grow with depth, not with the row, so every branch has
the positions of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from bastion_kernels.op import Op, cdiv, padded, public
from bastion_kernels.triton_or_none import tl, triton

_NODES = 32  # per program of the mask kernel
_ROWS = 256  # per program of the position kernel


@triton.jit
def _bits_kernel(
    parents,
    slots,
    out,
    stride_parents_s,
    stride_out_s,
    stride_out_n,
    N: tl.constexpr,
    WORDS: tl.constexpr,
    WORDS_PAD: tl.constexpr,
    NODES: tl.constexpr,
):
    """Grid: (R, ceil((N + 1) / NODES)). Every node climbs to the root, setting bits on its way."""
    i_r = tl.program_id(0)
    slot = tl.load(slots + i_r)
    if slot >= 0:
        parents += slot * stride_parents_s - 1  # indexed by node number, from 1
        i_b = tl.program_id(1)
        o_n = i_b * NODES + tl.arange(0, NODES)
        o_w = tl.arange(0, WORDS_PAD)
        b_parent = tl.load(parents + o_n, mask=(o_n > 0) & (o_n <= N), other=-1)
        m_used = (o_n == 0) | ((b_parent >= 0) & (b_parent < o_n))
        b_ancestor = tl.where(m_used, o_n, -1)
        b_bits = tl.zeros([NODES, WORDS_PAD], tl.int32)
        highest = tl.max(b_ancestor, 0)
        while highest >= 0:
            m_here = (b_ancestor[:, None] >= 0) & (o_w[None, :] == b_ancestor[:, None] // 32)
            b_bits |= tl.where(m_here, 1 << (b_ancestor[:, None] & 31), 0)
            b_up = tl.load(parents + b_ancestor, mask=b_ancestor > 0, other=-1)
            # only to lower numbers, so the loop ends even if the memory is garbage
            b_ancestor = tl.where(b_up < b_ancestor, b_up, -1)
            highest = tl.max(b_ancestor, 0)
        o_out = slot * stride_out_s + o_n[:, None].to(tl.int64) * stride_out_n + o_w[None, :]
        tl.store(out + o_out, b_bits, mask=(o_n[:, None] <= N) & (o_w[None, :] < WORDS))


@triton.jit(do_not_specialize=["T", "R", "steps"])
def _positions_kernel(
    positions,
    depths,
    slots,
    query_start_loc,
    tail_lens,
    out,
    T,
    R,
    steps,
    stride_depths_s,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (ceil(T / BLOCK),). Each row finds its request by binary search in query_start_loc."""
    i_b = tl.program_id(0)
    o_r = i_b * BLOCK + tl.arange(0, BLOCK)
    m_r = o_r < T
    m_inside = m_r & (o_r < tl.load(query_start_loc + R))
    b_low, b_high = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32) + R
    for _ in range(steps):  # the last request that starts at or before the row
        b_middle = (b_low + b_high) // 2
        m_later = tl.load(query_start_loc + b_middle, mask=m_inside, other=0) > o_r
        b_high = tl.where(m_later, b_middle, b_high)
        b_low = tl.where(m_later, b_low, b_middle)
    b_end = tl.load(query_start_loc + b_low + 1, mask=m_inside, other=0)
    b_root = b_end - tl.load(tail_lens + b_low, mask=m_inside, other=0)
    b_slot = tl.load(slots + b_low, mask=m_inside, other=-1)
    o_n = o_r - b_root - 1
    m_node = m_inside & (b_slot >= 0) & (o_n >= 0) & (o_n < N)
    b_depth = tl.load(depths + b_slot * stride_depths_s + o_n, mask=m_node, other=0)
    b_origin = tl.load(positions + b_root, mask=m_node, other=0)
    # roots keep their position, so `out` may be `positions` although other programs read roots
    b_linear = tl.load(positions + o_r, mask=m_r & (m_node == 0), other=0)
    tl.store(out + o_r, tl.where(m_node, b_origin + b_depth, b_linear), mask=m_r)


@dataclass(slots=True)
class AncestorBits(Op):
    """Write the ancestor mask of every request's tree.

    Bit j of a node is bit j % 32 of its word j // 32. Nodes without a parent (-1) are padding: they
    get no bits at all, not even their own.
    """

    # Node number of each column's parent, at most the column; -1 unused.
    parents: Annotated[Tensor, "[S, N] int32"]
    slots: Annotated[Tensor, "[R] int64"]  # request slot of each row, or -1: nothing written
    # Written in full for the slots of active rows.
    out: Annotated[Tensor, "[S, N + 1, N // 32 + 1] int32"]

    def triton(self) -> None:
        blocks, words = cdiv(self.parents.shape[1] + 1, _NODES), self.out.shape[2]
        self.launch(
            _bits_kernel,
            self.slots.shape[0],
            blocks,
            WORDS=words,
            WORDS_PAD=padded(words),
            NODES=_NODES,
            num_warps=1,
        )


ancestor_bits = public(AncestorBits, cpu="bastion_kernels.cpu.rows")


@dataclass(slots=True)
class TreePositions(Op):
    """Write every row's position: by depth within tails, unchanged elsewhere.

    The last `tail_lens[r]` rows of request r are its tail: the root, then nodes 1, 2, ... Rows of
    inert requests and rows past the last request are copied.
    """

    positions: Annotated[Tensor, "[T] int64"]  # linear positions
    depths: Annotated[Tensor, "[S, N] int32"]  # depth of each draft node, by slot
    slots: Annotated[Tensor, "[R] int64"]  # request slot of each row of the batch, or -1
    query_start_loc: Annotated[Tensor, "[R + 1] int32"]  # first row of each request
    tail_lens: Annotated[Tensor, "[R] int32"]  # rows of each request's tail; see `bind_slots`
    out: Annotated[Tensor, "[T] int64"]  # written; may be `positions` itself

    def triton(self) -> None:
        blocks = cdiv(self.positions.shape[0], _ROWS)
        steps = self.slots.shape[0].bit_length()
        self.launch(_positions_kernel, blocks, steps=steps, BLOCK=_ROWS)


tree_positions = public(TreePositions, cpu="bastion_kernels.cpu.rows")
