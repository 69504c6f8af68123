# SPDX-License-Identifier: Apache-2.0
"""The slots of a batch's rows, and the rows of the drafter's context."""

from __future__ import annotations

import torch

from bastion_kernels.rows import BindSlots, ContextRows
from tests.references.declare import of


@of(BindSlots)
def bind_slots(op: BindSlots) -> None:
    count = op.idx_mapping.shape[0]
    op.slots[:count], op.slots[count:] = op.idx_mapping, -1
    if op.tail_lens is not None:
        op.tail_lens.zero_()
        if op.cu_num_logits is not None:
            tails = torch.diff(op.cu_num_logits[: count + 1])
            op.tail_lens[:count] = tails.masked_fill(tails == 1, 0)


@of(ContextRows)
def context_rows(op: ContextRows) -> None:
    for r, sampled in enumerate(op.num_sampled.tolist()):
        start, end = op.context_start[r : r + 2].tolist()
        root = int(op.query_start_loc[r + 1] - op.cu_num_logits[r + 1] + op.cu_num_logits[r])
        for row in range(start, end):
            depth = row - start - int(op.rows_before[r])
            node = int(op.path[r, depth]) if 0 <= depth < op.path.shape[1] else -1
            op.source[row] = root + (node if node >= 0 else min(depth, 0))
            op.context_positions[row] = op.positions[root] + depth
        tail = end - start - int(op.rows_before[r])
        op.context_rejected[r] = tail - sampled if sampled > 0 else op.num_rejected[r]
        kept, first = end - int(op.context_rejected[r]), int(op.query_start_loc[r])
        for slots, into in zip(op.slot_mappings, op.context_slots, strict=True):
            into[start:kept] = slots[first : first + kept - start]
            into[kept:end] = -1
            op.context_positions[kept:end] = 0
