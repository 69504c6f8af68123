# SPDX-License-Identifier: Apache-2.0
"""Ancestor bits and tree positions on a CPU, equal to the references."""

from __future__ import annotations

import numpy as np

from bastion_kernels.cpu.cache import native


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
