# SPDX-License-Identifier: Apache-2.0
"""The drafter's inputs after a step of trees."""

from __future__ import annotations

import torch
from torch import Tensor

from bastion_kernels.draft.inputs import DraftInputs
from tests.references.declare import of


def fill(tensor: Tensor, where: slice, values: list[int], rest: int) -> None:
    padding = [rest] * (where.stop - where.start - len(values))
    tensor[where] = torch.tensor(values + padding).to(tensor.dtype)


def cache_slot(blocks: list[int], page: int, position: int) -> int:
    block = blocks[min(position // page, len(blocks) - 1)]
    return block * page + position % page if block else -1


@of(DraftInputs)
def draft_inputs(op: DraftInputs) -> None:
    width, queries = op.path.shape[1], op.queries
    live = sum(slot >= 0 for slot in op.slots.tolist())
    for r in range(op.source.shape[0] // width):
        slot = int(op.slots[r])
        path = [node for node in op.path[r].tolist() if node >= 0] if slot >= 0 else []
        root = int(op.query_start_loc[r])
        first = int(op.positions[root]) if slot >= 0 else 0
        places = [first + depth for depth in range(len(path))]
        asked = [first + len(path) + query for query in range(queries)] if slot >= 0 else []
        rows, into = slice(r * width, (r + 1) * width), slice(r * queries, (r + 1) * queries)
        fill(op.source, rows, [root + node for node in path], -1)
        fill(op.context_positions, rows, places, 0)
        ids = [int(op.last_sampled.flatten()[slot]), *[op.mask_token] * (queries - 1)]
        fill(op.input_ids, into, ids if asked else [], 0)
        fill(op.query_positions, into, [min(p, op.max_len - 1) for p in asked], 0)
        fill(op.is_padding, into, [False] * len(asked), True)
        groups = zip(op.block_tables, op.pages, op.context_slots, op.query_slots, strict=True)
        for table, page, kept, drafted in groups:
            blocks = table[r].tolist()
            fill(kept, rows, [cache_slot(blocks, page, p) for p in places], -1)
            fill(drafted, into, [cache_slot(blocks, page, p) for p in asked], -1)
        op.row_slots[r] = slot
        op.query_starts[0], op.query_starts[r + 1] = 0, min(r + 1, live) * queries
        op.seq_lens[r] = min(first + len(path) + queries, op.max_len) if asked else 0
