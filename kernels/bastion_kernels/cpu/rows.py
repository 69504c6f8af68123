# SPDX-License-Identifier: Apache-2.0
"""Row layouts, ancestor bits and tree positions on a CPU, equal to the references."""

from __future__ import annotations

import numpy as np

from bastion_kernels.cpu.cache import native, njit
from bastion_kernels.rows import ContextRows


@native
def bind_slots(idx_mapping, slots, tail_lens, cu_num_logits):
    count = idx_mapping.shape[0]
    slots[:count], slots[count:] = idx_mapping, -1
    if tail_lens is not None:
        tail_lens[:] = 0
        if cu_num_logits is not None:
            for row in range(count):
                tail = cu_num_logits[row + 1] - cu_num_logits[row]
                tail_lens[row] = tail if tail > 1 else 0


@njit
def _context_rows(
    context_start, rows_before, query_start_loc, cu_num_logits, path, positions, num_sampled,
    num_rejected, source, context_positions, context_rejected,
):  # fmt: skip
    for r in range(num_sampled.shape[0]):
        start, end = context_start[r], context_start[r + 1]
        root = query_start_loc[r + 1] - (cu_num_logits[r + 1] - cu_num_logits[r])
        for row in range(start, end):
            depth = row - start - rows_before[r]
            node = path[r, depth] if 0 <= depth < path.shape[1] else -1
            source[row] = root + (node if node >= 0 else min(depth, 0))
            context_positions[row] = positions[root] + depth
        rejected = end - start - rows_before[r] - num_sampled[r]
        context_rejected[r] = rejected if num_sampled[r] > 0 else num_rejected[r]


@njit
def _context_slots(context_start, context_rejected, query_start_loc, slots, into, positions):
    for r in range(context_rejected.shape[0]):
        start, end = context_start[r], context_start[r + 1]
        kept = end - context_rejected[r]
        for row in range(start, kept):
            into[row] = slots[query_start_loc[r] + row - start]
        for row in range(kept, end):
            into[row], positions[row] = -1, 0


def context_rows(op: ContextRows) -> None:
    _context_rows(
        op.context_start.numpy(), op.rows_before.numpy(), op.query_start_loc.numpy(),
        op.cu_num_logits.numpy(), op.path.numpy(), op.positions.numpy(), op.num_sampled.numpy(),
        op.num_rejected.numpy(), op.source.numpy(), op.context_positions.numpy(),
        op.context_rejected.numpy(),
    )  # fmt: skip
    for slots, into in zip(op.slot_mappings, op.context_slots, strict=True):
        _context_slots(
            op.context_start.numpy(), op.context_rejected.numpy(), op.query_start_loc.numpy(),
            slots.numpy(), into.numpy(), op.context_positions.numpy(),
        )  # fmt: skip


@native
def ancestor_bits(parents, slots, out):
    """A node's bits are its parent's and its own."""
    for r in range(slots.shape[0]):
        slot = slots[r]
        if slot < 0:
            continue
        out[slot, 0, :] = 0
        out[slot, 0, 0] = 1
        for column in range(parents.shape[1]):
            node, parent = column + 1, parents[slot, column]
            if 0 <= parent <= column:
                out[slot, node, :] = out[slot, parent, :]
                out[slot, node, node >> 5] |= np.int32(1) << np.int32(node & 31)
            else:
                out[slot, node, :] = 0


@native
def tree_positions(positions, depths, slots, query_start_loc, tail_lens, out):
    """Copy the linear positions, then overwrite the tails."""
    out[:] = positions
    for r in range(slots.shape[0]):
        slot, tail = slots[r], tail_lens[r]
        if slot >= 0:
            root = query_start_loc[r + 1] - tail
            for node in range(1, min(tail, depths.shape[1] + 1)):
                out[root + node] = out[root] + depths[slot, node - 1]
