# SPDX-License-Identifier: Apache-2.0
"""The blocks of a step's states on a CPU, in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from bastion_kernels.gated_delta.blocks import FindCommits, FindStates, StateBlocks


def _after(blocks: StateBlocks, tokens: Tensor) -> list[Tensor]:
    """The block of each request's state after `tokens` [R] tokens, by group: [R] int32."""
    reqs = len(tokens)
    if not blocks.block_size:
        return [table[:reqs, 0] for table in blocks.tables]
    columns = blocks.column_after(tokens)
    # a dummy batch can have any number of tokens
    return [
        table[:reqs].gather(1, columns.clamp(0, table.shape[1] - 1).long()[:, None])[:, 0]
        for table in blocks.tables
    ]


def find_states(op: FindStates) -> None:
    reqs = op.seq_lens.shape[0]
    rows = op.query_start_loc.diff()
    torch.sub(op.seq_lens, rows, out=op.computed[:reqs])
    if op.decodes is not None:
        rows = rows * op.decodes
    op.starts[0] = 0
    ends = torch.cumsum(rows, 0, dtype=torch.int32, out=op.starts[1 : reqs + 1])
    skipped = (rows <= 0) | (ends > op.max_rows)
    for into, block in zip(op.state_rows, _after(op.blocks, op.computed[:reqs]), strict=True):
        into[:reqs] = block.masked_fill(skipped, -1)


def find_commits(op: FindCommits) -> None:
    size = op.blocks.block_size
    torch.sum((op.path >= 0).cumprod(1), 1, dtype=torch.int32, out=op.lengths[0])
    end = op.computed + op.lengths[0]
    block_end = end // size * size
    inside = (block_end > op.computed) & (block_end < end)
    op.lengths[1] = (block_end - op.computed).clamp(min=0)
    ends = zip(_after(op.blocks, end), _after(op.blocks, block_end), strict=True)
    for group, (last, inner) in enumerate(ends):
        op.into_rows[0, group] = last
        op.into_rows[1, group] = inner.masked_fill(~inside, -1)
