# SPDX-License-Identifier: Apache-2.0
"""Where the states of a step are, request by request."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

from bastion_kernels.gated_delta.blocks import FindCommits, FindStates
from tests.references.declare import of


def block_after(table: Tensor, request: int, tokens: int, size: int) -> int:
    """The block of a request's state after so many tokens; a dummy batch may have any number."""
    column = -(-tokens // size) - 1 if size else 0
    return int(table[request, min(max(column, 0), table.shape[1] - 1)])


@of(FindStates)
def find_states(op: FindStates) -> None:
    op.starts[0] = end = 0
    for r, (first, last) in enumerate(pairwise(op.query_start_loc.tolist())):
        op.computed[r] = before = int(op.seq_lens[r]) - (last - first)
        rows = last - first if op.decodes is None or op.decodes[r] else 0
        op.starts[r + 1] = end = end + rows
        for into, table in zip(op.state_rows, op.blocks.tables, strict=True):
            held = rows > 0 and end <= op.max_rows
            into[r] = block_after(table, r, before, op.blocks.block_size) if held else -1


@of(FindCommits)
def find_commits(op: FindCommits) -> None:
    size = op.blocks.block_size
    for r, before in enumerate(op.computed.tolist()):
        length = int((op.path[r] >= 0).long().cumprod(0).sum())
        end, block_end = before + length, (before + length) // size * size
        op.lengths[0, r], op.lengths[1, r] = length, max(block_end - before, 0)
        for group, table in enumerate(op.blocks.tables):
            op.into_rows[0, group, r] = block_after(table, r, end, size)
            inside = before < block_end < end
            op.into_rows[1, group, r] = block_after(table, r, block_end, size) if inside else -1
