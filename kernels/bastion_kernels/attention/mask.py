# SPDX-License-Identifier: Apache-2.0
"""What the target needs to know of a tree: ancestor bits for attention, depths as positions.

    out[s, i] bit j  =  node j is an ancestor of node i, or i itself       (root included: bit 0)
    position(node i) =  position(root) + depth(i)

The bits say which rows of its own tail a node may attend to; the rows of the committed context are
visible to all. Positions grow by depth, not by row, so that every branch is encoded as the sequence
it stands for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bastion_kernels.checks import check, version_for
from bastion_kernels.cpu.mask import ancestor_bits_cpu, tree_positions_cpu
from bastion_kernels.triton_or_none import tl, triton

__all__ = [
    "ancestor_bits",
    "ancestor_bits_reference",
    "ancestor_bits_triton",
    "tree_positions",
    "tree_positions_reference",
    "tree_positions_triton",
]

_NODES = 32  # per program of the mask kernel
_ROWS = 256  # per program of the position kernel


def ancestor_bits_reference(parents: Tensor, slots: Tensor, out: Tensor) -> None:
    """A node's bits are its parent's and its own; see `ancestor_bits`."""
    words = out.shape[2]
    for slot in slots.tolist():
        if slot < 0:
            continue
        bits = [1]
        for node, parent in enumerate(parents[slot].tolist(), start=1):
            bits.append(bits[parent] | 1 << node if 0 <= parent < node else 0)
        raw = b"".join(mask.to_bytes(4 * words, "little") for mask in bits)
        out[slot] = torch.frombuffer(bytearray(raw), dtype=torch.int32).view(-1, words)


def tree_positions_reference(
    positions: Tensor,
    depths: Tensor,
    slots: Tensor,
    query_start_loc: Tensor,
    cu_num_logits: Tensor,
    out: Tensor,
) -> None:
    """Linear positions, then the tails on top; see `tree_positions`."""
    if out.data_ptr() != positions.data_ptr():
        out.copy_(positions)
    starts, logits = query_start_loc.tolist(), cu_num_logits.tolist()
    for r, slot in enumerate(slots.tolist()):
        tail = logits[r + 1] - logits[r]
        if slot >= 0 and tail > 1:
            root = starts[r + 1] - tail
            out[root + 1 : root + tail] = positions[root] + depths[slot, : tail - 1]


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
        at = tl.where(used, node, -1)
        bits = tl.zeros([NODES, WORDS_PAD], tl.int32)
        highest = tl.max(at, 0)
        while highest >= 0:
            here = (at[:, None] >= 0) & (word[None, :] == at[:, None] // 32)
            bits |= tl.where(here, 1 << (at[:, None] & 31), 0)
            up = tl.load(parents_ptr + at, mask=at > 0, other=-1)
            at = tl.where(up < at, up, -1)  # strictly downward: ends whatever the memory holds
            highest = tl.max(at, 0)
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


def ancestor_bits_triton(parents: Tensor, slots: Tensor, out: Tensor) -> None:
    """Nodes in parallel, bits in registers; see `ancestor_bits`."""
    reqs, limit, words = slots.shape[0], parents.shape[1], out.shape[2]
    if reqs == 0:
        return
    _bits_kernel[(reqs, triton.cdiv(limit + 1, _NODES))](
        parents,
        slots,
        out,
        parents.stride(0),
        out.stride(0),
        out.stride(1),
        N=limit,
        WORDS=words,
        WORDS_PAD=triton.next_power_of_2(words),
        NODES=_NODES,
        num_warps=1,
    )


def tree_positions_triton(
    positions: Tensor,
    depths: Tensor,
    slots: Tensor,
    query_start_loc: Tensor,
    cu_num_logits: Tensor,
    out: Tensor,
) -> None:
    """Rows in parallel; see `tree_positions`."""
    rows, reqs = positions.shape[0], slots.shape[0]
    if rows == 0:
        return
    _positions_kernel[(triton.cdiv(rows, _ROWS),)](
        positions,
        depths,
        slots,
        query_start_loc,
        cu_num_logits,
        out,
        rows,
        reqs,
        reqs.bit_length(),
        depths.stride(0),
        N=depths.shape[1],
        BLOCK=_ROWS,
    )


def ancestor_bits(parents: Tensor, slots: Tensor, out: Tensor) -> None:
    """Write the ancestor mask of every request's tree.

    Bit j of a node is bit j % 32 of its word j // 32. Nodes without a parent (-1) get no bits, not
    even their own: such a row is padding, and what it attends to is the attention's affair.

    Args:
        parents: `[S, N]` int32, node number of each column's parent, at most the column; -1 unused.
        slots: `[R]` int64, request slot of each row, or -1: nothing written.
        out: `[S, N + 1, ceil((N + 1) / 32)]` int32, written in full for the slots of active rows.

    Raises:
        ValueError, TypeError: shapes or dtypes do not fit together.
    """
    op, (num_slots, limit) = "ancestor_bits", parents.shape
    check(op, "parents", parents, (num_slots, limit), torch.int32)
    check(op, "slots", slots, (None,), torch.int64)
    check(op, "out", out, (num_slots, limit + 1, limit // 32 + 1), torch.int32)
    run = version_for(parents, ancestor_bits_triton, ancestor_bits_cpu, ancestor_bits_reference)
    run(parents, slots, out)


def tree_positions(
    positions: Tensor,
    depths: Tensor,
    slots: Tensor,
    query_start_loc: Tensor,
    cu_num_logits: Tensor,
    out: Tensor,
) -> None:
    """Write every row's position: by depth in the tails, as it was elsewhere.

    The last `cu_num_logits[r+1] - cu_num_logits[r]` rows of request r are its tail: the root, then
    nodes 1, 2, ... Rows of inert requests and rows past the last request are copied.

    Args:
        positions: `[T]` int64, linear positions.
        depths: `[S, N]` int32, depth of each draft node, by slot.
        slots: `[R]` int64, request slot of each row of the batch, or -1.
        query_start_loc: `[R+1]` int32, first row of each request.
        cu_num_logits: `[R+1]` int32, first logits row of each request.
        out: `[T]` int64, written; may be `positions` itself.

    Raises:
        ValueError, TypeError: shapes or dtypes do not fit together.
    """
    op, reqs = "tree_positions", slots.shape[0]
    check(op, "positions", positions, (None,), torch.int64)
    check(op, "depths", depths, (None, None), torch.int32)
    check(op, "slots", slots, (reqs,), torch.int64)
    check(op, "query_start_loc", query_start_loc, (reqs + 1,), torch.int32)
    check(op, "cu_num_logits", cu_num_logits, (reqs + 1,), torch.int32)
    check(op, "out", out, (positions.shape[0],), torch.int64)
    run = version_for(
        positions, tree_positions_triton, tree_positions_cpu, tree_positions_reference
    )
    run(positions, depths, slots, query_start_loc, cu_num_logits, out)
