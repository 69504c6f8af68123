# SPDX-License-Identifier: Apache-2.0
"""The blocks of the states that a step reads and writes.

A block's state is the one after the block's last token. With size tokens in a block, the state
after c tokens is in column ceil(c / size) - 1 of the request's block table; there is none for
c = 0. An accepted path of n rows moves a request from c to c + n tokens. If a block ends between
them, at e = (c + n) // size * size with c < e < c + n, its state is written too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from bastion_kernels.op import Op, padded, public
from bastion_kernels.triton_or_none import tl, triton


class StateBlocks:
    """The block tables of G groups of layers.

    Args:
        tables: `[S, columns]` int32 of each group, one row for each request of the batch.
        block_size: tokens in a block; 0: a request has one state, in column 0.
    """

    def __init__(self, tables: Sequence[Tensor], block_size: int) -> None:
        self.tables, self.block_size = list(tables), block_size
        # address, stride of a row, columns of each group
        self.layout = torch.tensor(
            [(table.data_ptr(), table.stride(0), table.shape[1]) for table in tables],
            dtype=torch.int64,
            device=self.tables[0].device,
        )

    def column_after(self, tokens: Tensor) -> Tensor:
        """The column of the state after `tokens` tokens in blocks with a size; -1 = none."""
        return (tokens + self.block_size - 1) // self.block_size - 1


@triton.jit
def _block_after(layout, i_g, b_request, b_tokens, m_wanted, BLOCK_SIZE: tl.constexpr):
    """The block of the state after `b_tokens` tokens of each request, in one group."""
    p_table = tl.load(layout + i_g * 3).to(tl.pointer_type(tl.int32))
    o_table = b_request * tl.load(layout + i_g * 3 + 1)
    if BLOCK_SIZE:
        b_column = (b_tokens + BLOCK_SIZE - 1) // BLOCK_SIZE - 1
        columns = tl.load(layout + i_g * 3 + 2)
        o_table += tl.minimum(tl.maximum(b_column.to(tl.int64), 0), columns - 1)
    return tl.load(p_table + o_table, mask=m_wanted, other=-1)


@triton.jit(
    do_not_specialize=["R", "max_rows", "stride_state_rows_g"],
    do_not_specialize_on_alignment=["query_start_loc", "seq_lens", "decodes"],
)
def _find_states_kernel(
    # [R+1] int32, [R] int32, [R] bool or None
    query_start_loc,
    seq_lens,
    decodes,
    # [G, 3] int64
    layout,
    # [>= R+1] int32, [>= R] int32, [G, >= R] int32 (written)
    starts,
    computed,
    state_rows,
    R,
    max_rows,
    stride_state_rows_g,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """All requests of one group; the first also writes `starts` and `computed`. Grid: (G,)."""
    i_g = tl.program_id(0)
    o_r = tl.arange(0, BLOCK)
    m_r = o_r < R
    b_first = tl.load(query_start_loc + o_r, mask=m_r, other=0)
    b_rows = tl.load(query_start_loc + o_r + 1, mask=m_r, other=0) - b_first
    b_tokens = tl.load(seq_lens + o_r, mask=m_r, other=0) - b_rows
    if decodes is not None:
        b_decodes = tl.load(decodes + o_r, mask=m_r, other=0).to(tl.int32)
        b_rows = tl.where(b_decodes != 0, b_rows, 0)
    b_end = tl.cumsum(b_rows, 0)
    m_held = (b_rows > 0) & (b_end <= max_rows)
    b_block = _block_after(layout, i_g, o_r, b_tokens, m_held, BLOCK_SIZE)
    tl.store(state_rows + i_g * stride_state_rows_g + o_r, b_block, mask=m_r)
    if i_g == 0:
        tl.store(starts + o_r, b_end - b_rows, mask=m_r)
        tl.store(starts + o_r + 1, b_end, mask=o_r == R - 1)
        tl.store(computed + o_r, b_tokens, mask=m_r)


@triton.jit(
    do_not_specialize=[
        "stride_path_r",
        "stride_into_rows_2",
        "stride_into_rows_g",
        "stride_lengths_2",
    ],
    do_not_specialize_on_alignment=["computed", "path", "into_rows", "lengths"],
)
def _find_commits_kernel(
    # [R] int32, [R, PATH] int32, [G, 3] int64
    computed,
    path,
    layout,
    # [2, G, R] int32, [2, R] int32 (written)
    into_rows,
    lengths,
    stride_path_r,
    stride_into_rows_2,
    stride_into_rows_g,
    stride_lengths_2,
    G: tl.constexpr,
    PATH: tl.constexpr,
    PATHS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """One request. Grid: (R,)."""
    i_r = tl.program_id(0).to(tl.int64)
    o_path = tl.arange(0, PATHS)
    b_node = tl.load(path + i_r * stride_path_r + o_path, mask=o_path < PATH, other=-1)
    length = tl.min(tl.where(b_node >= 0, PATHS, o_path), 0)
    before = tl.load(computed + i_r)
    end = before + length
    block_end = end // BLOCK_SIZE * BLOCK_SIZE
    ends_inside = (block_end > before) & (block_end < end)
    tl.store(lengths + i_r, length)
    tl.store(lengths + stride_lengths_2 + i_r, tl.maximum(block_end - before, 0))
    for i_g in tl.static_range(G):
        p_into = into_rows + i_g * stride_into_rows_g + i_r
        last = _block_after(layout, i_g, i_r, end, length >= 0, BLOCK_SIZE)
        tl.store(p_into, last)
        inner = _block_after(layout, i_g, i_r, block_end, ends_inside, BLOCK_SIZE)
        tl.store(p_into + stride_into_rows_2, inner)


@dataclass(slots=True)
class FindStates(Op):
    """Number the rows of decoding requests, and find the states that these requests start from."""

    query_start_loc: Annotated[Tensor, "[R + 1] int32"]  # first row; padding has no rows
    seq_lens: Annotated[Tensor, "[R] int32"]  # tokens of each request with this step's
    decodes: Annotated[Tensor | None, "[R] bool"]  # whose rows count; None: of all
    blocks: StateBlocks  # G groups of layers
    max_rows: int  # a request whose rows end beyond this many is skipped
    # Written, for S >= R requests: rows before each request's that count, and all of them.
    starts: Annotated[Tensor, "[>= R + 1] int32"]
    computed: Annotated[Tensor, "[S] int32"]  # written: tokens before the step
    # Written: blocks of the states before the step; -1 = none, skipped or no rows.
    state_rows: Annotated[Tensor, "[G, S] int32"]

    def check(self) -> None:
        self.check_declared(S=self.starts.shape[0] - 1, G=len(self.blocks.tables))

    def triton(self) -> None:
        self.launch(
            _find_states_kernel,
            len(self.blocks.tables) if self.seq_lens.shape[0] else 0,
            layout=self.blocks.layout,
            BLOCK_SIZE=self.blocks.block_size,
            BLOCK=padded(self.computed.shape[0]),
        )


find_states = public(FindStates, cpu="bastion_kernels.cpu.state_blocks")


@dataclass(slots=True)
class FindCommits(Op):
    """Find the states that accepted paths write: at their ends, and at a block's end within."""

    computed: Annotated[Tensor, "[R] int32"]  # tokens before the step
    path: Annotated[Tensor, "[R, PATH] int32"]  # nodes of the accepted path, -1 past its end
    blocks: StateBlocks  # G groups of layers, of blocks with a size
    # Written: the block of the state after the path; of the state at the end of a block within the
    # path, -1 = none.
    into_rows: Annotated[Tensor, "[2, G, R] int32"]
    lengths: Annotated[Tensor, "[2, R] int32"]  # written: entries of the path up to these states

    def check(self) -> None:
        self.check_declared(G=len(self.blocks.tables))
        if not self.blocks.block_size:
            raise ValueError(f"{self.name}: a request with one state writes where it reads")

    def triton(self) -> None:
        self.launch(
            _find_commits_kernel,
            self.path.shape[0],
            layout=self.blocks.layout,
            PATHS=padded(self.path.shape[1]),
            BLOCK_SIZE=self.blocks.block_size,
            num_warps=1,
        )


find_commits = public(FindCommits, cpu="bastion_kernels.cpu.state_blocks")
