# SPDX-License-Identifier: Apache-2.0
"""The row layouts of `rows` on a CPU, equal to the references."""

from __future__ import annotations

import numpy as np

from bastion_kernels.cpu.cache import njit
from bastion_kernels.rows import BindSlots, ContextRows

_NO_TREES = np.empty(0, np.int32)


@njit
def _bind(idx_mapping, cu_num_logits, slots, tail_lens):
    count = idx_mapping.shape[0]
    for row in range(slots.shape[0]):
        slot = np.int64(idx_mapping[row]) if row < count else -1
        slots[row] = slot
        if row < tail_lens.shape[0]:
            tail = 0
            if slot >= 0 and cu_num_logits.shape[0] > 0:
                tail = cu_num_logits[row + 1] - cu_num_logits[row]
            tail_lens[row] = tail if tail > 1 else 0


def bind_slots(op: BindSlots) -> None:
    tails = _NO_TREES if op.cu_num_logits is None else op.cu_num_logits.numpy()
    lens = _NO_TREES if op.tail_lens is None else op.tail_lens.numpy()
    _bind(op.idx_mapping.numpy(), tails, op.slots.numpy(), lens)


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
