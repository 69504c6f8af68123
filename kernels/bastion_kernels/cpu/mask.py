# SPDX-License-Identifier: Apache-2.0
"""Ancestor bits and tree positions on a CPU, equal to the references."""

from __future__ import annotations

import numpy as np

from bastion_kernels.attention.mask import AncestorBits, TreePositions
from bastion_kernels.cpu.cache import njit


@njit
def _bits(parents, slots, out):
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
                out[slot, node, node >> 5] |= np.uint32(1) << np.uint32(node & 31)
            else:
                out[slot, node, :] = 0


def ancestor_bits(op: AncestorBits) -> None:
    """A node's bits are its parent's and its own."""
    _bits(op.parents.numpy(), op.slots.numpy(), op.out.numpy().view(np.uint32))


@njit
def _positions(depths, slots, query_start_loc, tail_lens, out):
    for r in range(slots.shape[0]):
        slot, tail = slots[r], tail_lens[r]
        if slot >= 0:
            root = query_start_loc[r + 1] - tail
            for node in range(1, min(tail, depths.shape[1] + 1)):
                out[root + node] = out[root] + depths[slot, node - 1]


def tree_positions(op: TreePositions) -> None:
    """Copy the linear positions, then overwrite the tails."""
    if op.out.data_ptr() != op.positions.data_ptr():
        op.out.copy_(op.positions)
    _positions(
        op.depths.numpy(),
        op.slots.numpy(),
        op.query_start_loc.numpy(),
        op.tail_lens.numpy(),
        op.out.numpy(),
    )
