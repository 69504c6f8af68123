# SPDX-License-Identifier: Apache-2.0
"""What the target reads of a tree: ancestor bits for attention, depths as positions.

    out[s, i] bit j  =  node j is an ancestor of node i, or i itself       (root included: bit 0)
    position(node i) =  position(root) + depth(i)

The bits say which rows of its own tail a node may attend to; the rows of the committed context are
visible to all. Positions grow by depth, not by row, so that every branch is encoded as the sequence
it stands for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bastion_kernels.op import Op, public
from bastion_kernels.triton_or_none import tl, triton

_NODES = 32  # per program of the mask kernel
_ROWS = 256  # per program of the position kernel


@triton.jit
def _bits_kernel(
    parents_ptr,
    slots_ptr,
    out_ptr,
    parents_s,
    out_s,
    out_n,
    N: tl.constexpr,
    WORDS: tl.constexpr,
    WORDS_PAD: tl.constexpr,
    NODES: tl.constexpr,
):
    """Grid: (R, ceil((N + 1) / NODES)). Every node climbs to the root, setting bits on its way."""
    slot = tl.load(slots_ptr + tl.program_id(0))
    if slot >= 0:
        parents_ptr += slot * parents_s - 1  # indexed by node number, from 1
        node = tl.program_id(1) * NODES + tl.arange(0, NODES)
        word = tl.arange(0, WORDS_PAD)
        parent = tl.load(parents_ptr + node, mask=(node > 0) & (node <= N), other=-1)
        used = (node == 0) | ((parent >= 0) & (parent < node))
        ancestor = tl.where(used, node, -1)
        bits = tl.zeros([NODES, WORDS_PAD], tl.int32)
        highest = tl.max(ancestor, 0)
        while highest >= 0:
            here = (ancestor[:, None] >= 0) & (word[None, :] == ancestor[:, None] // 32)
            bits |= tl.where(here, 1 << (ancestor[:, None] & 31), 0)
            up = tl.load(parents_ptr + ancestor, mask=ancestor > 0, other=-1)
            # to lower numbers only: ends whatever the memory holds
            ancestor = tl.where(up < ancestor, up, -1)
            highest = tl.max(ancestor, 0)
        offset = slot * out_s + node[:, None].to(tl.int64) * out_n + word[None, :]
        tl.store(out_ptr + offset, bits, mask=(node[:, None] <= N) & (word[None, :] < WORDS))


@triton.jit(do_not_specialize=["rows", "reqs", "steps"])
def _positions_kernel(
    positions_ptr,
    depths_ptr,
    slots_ptr,
    starts_ptr,
    logits_ptr,
    out_ptr,
    rows,
    reqs,
    steps,
    depths_s,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (ceil(T / BLOCK),). Each row finds its request by binary search in query_start_loc."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = row < rows
    inside = real & (row < tl.load(starts_ptr + reqs))
    low, high = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32) + reqs
    for _ in range(steps):  # the last request that starts at or before the row
        middle = (low + high) // 2
        later = tl.load(starts_ptr + middle, mask=inside, other=0) > row
        high = tl.where(later, middle, high)
        low = tl.where(later, low, middle)
    end = tl.load(starts_ptr + low + 1, mask=inside, other=0)
    last = tl.load(logits_ptr + low + 1, mask=inside, other=0)
    root = end - (last - tl.load(logits_ptr + low, mask=inside, other=0))
    slot = tl.load(slots_ptr + low, mask=inside, other=-1)
    column = row - root - 1
    drafted = inside & (slot >= 0) & (column >= 0) & (column < N)
    depth = tl.load(depths_ptr + slot * depths_s + column, mask=drafted, other=0)
    origin = tl.load(positions_ptr + root, mask=drafted, other=0)
    # a root keeps its position, so `out` may be `positions`: what others read does not change
    linear = tl.load(positions_ptr + row, mask=real & (drafted == 0), other=0)
    tl.store(out_ptr + row, tl.where(drafted, origin + depth, linear), mask=real)


@dataclass(slots=True)
class AncestorBits(Op):
    """Write the ancestor mask of every request's tree.

    Bit j of a node is bit j % 32 of its word j // 32. Nodes without a parent (-1) get no bits, not
    even their own: such a row is padding.

    Raises:
        ValueError, TypeError: shapes or dtypes do not fit together.
    """

    parents: Tensor
    """`[S, N]` int32, node number of each column's parent, at most the column; -1 unused."""
    slots: Tensor
    """`[R]` int64, request slot of each row, or -1: nothing written."""
    out: Tensor
    """`[S, N + 1, ceil((N + 1) / 32)]` int32, written in full for the slots of active rows."""

    def check(self) -> None:
        (num_slots, limit) = self.parents.shape
        self.expect("parents", (num_slots, limit), torch.int32)
        self.expect("slots", (None,), torch.int64)
        self.expect("out", (num_slots, limit + 1, limit // 32 + 1), torch.int32)

    def reference(self) -> None:
        """A node's bits are its parent's and its own."""
        words = self.out.shape[2]
        for slot in self.slots.tolist():
            if slot < 0:
                continue
            bits = [1]
            for node, parent in enumerate(self.parents[slot].tolist(), start=1):
                bits.append(bits[parent] | 1 << node if 0 <= parent < node else 0)
            raw = b"".join(mask.to_bytes(4 * words, "little") for mask in bits)
            self.out[slot] = torch.frombuffer(bytearray(raw), dtype=torch.int32).view(-1, words)

    def triton(self) -> None:
        """Nodes in parallel, bits in registers."""
        reqs, limit, words = self.slots.shape[0], self.parents.shape[1], self.out.shape[2]
        if reqs == 0:
            return
        _bits_kernel[(reqs, triton.cdiv(limit + 1, _NODES))](
            self.parents,
            self.slots,
            self.out,
            self.parents.stride(0),
            self.out.stride(0),
            self.out.stride(1),
            N=limit,
            WORDS=words,
            WORDS_PAD=triton.next_power_of_2(words),
            NODES=_NODES,
            num_warps=1,
        )


ancestor_bits = public(AncestorBits, cpu="bastion_kernels.cpu.mask")


@dataclass(slots=True)
class TreePositions(Op):
    """Write every row's position: by depth in the tails, as it was elsewhere.

    The last `cu_num_logits[r+1] - cu_num_logits[r]` rows of request r are its tail: the root, then
    nodes 1, 2, ... Rows of inert requests and rows past the last request are copied.

    Raises:
        ValueError, TypeError: shapes or dtypes do not fit together.
    """

    positions: Tensor
    """`[T]` int64, linear positions."""
    depths: Tensor
    """`[S, N]` int32, depth of each draft node, by slot."""
    slots: Tensor
    """`[R]` int64, request slot of each row of the batch, or -1."""
    query_start_loc: Tensor
    """`[R+1]` int32, first row of each request."""
    cu_num_logits: Tensor
    """`[R+1]` int32, first logits row of each request."""
    out: Tensor
    """`[T]` int64, written; may be `positions` itself."""

    def check(self) -> None:
        reqs = self.slots.shape[0]
        self.expect("positions", (None,), torch.int64)
        self.expect("depths", (None, None), torch.int32)
        self.expect("slots", (reqs,), torch.int64)
        self.expect("query_start_loc", (reqs + 1,), torch.int32)
        self.expect("cu_num_logits", (reqs + 1,), torch.int32)
        self.expect("out", (self.positions.shape[0],), torch.int64)

    def reference(self) -> None:
        """Linear positions, then the tails on top."""
        if self.out.data_ptr() != self.positions.data_ptr():
            self.out.copy_(self.positions)
        starts, logits = self.query_start_loc.tolist(), self.cu_num_logits.tolist()
        for r, slot in enumerate(self.slots.tolist()):
            tail = logits[r + 1] - logits[r]
            if slot >= 0 and tail > 1:
                root = starts[r + 1] - tail
                self.out[root + 1 : root + tail] = (
                    self.positions[root] + self.depths[slot, : tail - 1]
                )

    def triton(self) -> None:
        """Rows in parallel."""
        rows, reqs = self.positions.shape[0], self.slots.shape[0]
        if rows == 0:
            return
        _positions_kernel[(triton.cdiv(rows, _ROWS),)](
            self.positions,
            self.depths,
            self.slots,
            self.query_start_loc,
            self.cu_num_logits,
            self.out,
            rows,
            reqs,
            reqs.bit_length(),
            self.depths.stride(0),
            N=self.depths.shape[1],
            BLOCK=_ROWS,
        )


tree_positions = public(TreePositions, cpu="bastion_kernels.cpu.mask")
