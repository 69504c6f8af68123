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

from bastion_kernels.checks import check

__all__ = [
    "ancestor_bits",
    "ancestor_bits_reference",
    "tree_positions",
    "tree_positions_reference",
]


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
    ancestor_bits_reference(parents, slots, out)


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
    tree_positions_reference(positions, depths, slots, query_start_loc, cu_num_logits, out)
