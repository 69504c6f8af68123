# SPDX-License-Identifier: Apache-2.0
"""The drafter's inputs after a step of trees, from buffers that a CUDA graph can read.

The context of a request is its accepted path, whose row d has moved to the cache slot of position
p + d (`compact_caches`), p being that of the bonus token before it. With c rows on the path,

    source[r, d] = root row of r + path[r, d]        for d < c, then -1
    queries      = the last sampled token and mask tokens, at positions p + c, p + c + 1, ..

Sizes are those of the graph; a slot of -1 marks padding, whose queries are empty and whose rows
have no cache slot. All that differs between steps is read from device memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from bastion_kernels.op import Op, padded, public
from bastion_kernels.triton_or_none import tl, triton


@triton.jit
def _cache_slots(p_table, b_position, mask, blocks, page):
    """Cache slots of a request's positions; -1 in block 0, vLLM's null block."""
    b_block = tl.minimum(b_position // page, blocks - 1)
    b_block = tl.load(p_table + b_block, mask=mask, other=0).to(tl.int64)
    return tl.where(mask & (b_block != 0), b_block * page + b_position % page, -1)


@triton.jit
def _inputs_kernel(
    slots,
    query_start_loc,
    path,
    positions,
    last_sampled,
    # tuples, an entry for each of the drafter's KV cache groups
    block_tables,
    pages,
    source,
    context_positions,
    context_slots,
    row_slots,
    input_ids,
    query_positions,
    query_slots,
    is_padding,
    query_starts,
    seq_lens,
    total,
    mask_token,
    max_len,
    stride_path,
    stride_block_tables_b,
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Grid: (R,)."""
    i_r = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + i_r)
    live = slot >= 0
    root = tl.load(query_start_loc + i_r)
    o_d = tl.arange(0, BLOCK_W)
    b_node = tl.load(path + i_r * stride_path + o_d, mask=live & (o_d < WIDTH), other=-1)
    m_d = b_node >= 0
    count = tl.sum(m_d.to(tl.int32), 0)
    position = tl.load(positions + root, mask=live, other=0)
    b_position = tl.where(m_d, position + o_d, 0)
    o_row = i_r * WIDTH + o_d
    tl.store(source + o_row, tl.where(m_d, root + b_node, -1), mask=o_d < WIDTH)
    tl.store(context_positions + o_row, b_position, mask=o_d < WIDTH)
    tl.store(row_slots + i_r, slot)

    o_q = tl.arange(0, BLOCK_Q)
    m_q, m_live = o_q < QUERIES, live & (o_q < QUERIES)
    o_query = i_r * QUERIES + o_q
    b_query = position + count + o_q
    token = tl.load(last_sampled + slot, mask=live, other=0).to(tl.int32)
    b_token = tl.where(live, tl.where(o_q == 0, token, mask_token), 0)
    tl.store(input_ids + o_query, b_token, mask=m_q)
    b_limited = tl.where(live, tl.minimum(b_query, max_len - 1), 0)
    tl.store(query_positions + o_query, b_limited, mask=m_q)
    tl.store(is_padding + o_query, tl.where(m_live, False, True), mask=m_q)
    for i in tl.static_range(len(block_tables)):
        p_table = block_tables[i] + i_r * stride_block_tables_b[i]
        b_slot = _cache_slots(p_table, b_position, m_d, stride_block_tables_b[i], pages[i])
        tl.store(context_slots[i] + o_row, b_slot, mask=o_d < WIDTH)
        b_slot = _cache_slots(p_table, b_query, m_live, stride_block_tables_b[i], pages[i])
        tl.store(query_slots[i] + o_query, b_slot, mask=m_q)

    o_s = tl.arange(0, BLOCK_S)
    b_live = tl.load(slots + o_s, mask=o_s < total, other=-1) >= 0
    reqs = tl.sum(b_live.to(tl.int32), 0)
    if i_r == 0:
        tl.store(query_starts, 0)
    tl.store(query_starts + i_r + 1, tl.minimum(i_r + 1, reqs) * QUERIES)
    length = tl.where(live, tl.minimum(position + count + QUERIES, max_len), 0)
    tl.store(seq_lens + i_r, length)


@dataclass(slots=True)
class DraftInputs(Op):
    """Write the drafter's context rows and queries; see the module. W = L + 1 context rows a
    request, Q queries.

    The batch has no prompt: a request's first row is its bonus token. What is written for the
    queries is what vLLM's ``prepare_dflash_inputs`` writes.
    """

    slots: Annotated[Tensor, "[S] int64"]  # request slots of the batch, then -1
    query_start_loc: Annotated[Tensor, "[*] int32"]  # first row in the target's batch
    path: Annotated[Tensor, "[*, WIDTH] int32"]  # nodes of the accepted path, -1 past its end
    positions: Annotated[Tensor, "[T] int64"]  # of the target's rows, linear in a request
    last_sampled: Tensor  # [S] integer, by slot
    # Of each group, by row of the batch.
    block_tables: Annotated[Sequence[Tensor], "G of [B, *] int32"]
    pages: Sequence[int]  # rows in a block of each group
    # Written: row of the target's batch, of each of R * W context rows; -1 past the path.
    source: Annotated[Tensor, "[M] int64"]
    context_positions: Annotated[Tensor, "[>= M] int64"]  # written; 0 past the path
    # Of each group, written; -1 past the path.
    context_slots: Annotated[Sequence[Tensor], "G of [>= M] int64"]
    row_slots: Annotated[Tensor, "[S] int64"]  # written: slots of the first R rows
    # Written: of each of R * Q queries.
    input_ids: Annotated[Tensor, "[X] int32"]
    query_positions: Annotated[Tensor, "[X] int64"]
    query_slots: Annotated[Sequence[Tensor], "G of [*] int64"]
    is_padding: Annotated[Tensor, "[X] bool"]
    query_starts: Annotated[Tensor, "[S + 1] int32"]  # written: first query of each request
    # Written: tokens that a request's last query sees; 0 for padding.
    seq_lens: Annotated[Tensor, "[S] int32"]
    queries: int  # Q
    mask_token: int
    max_len: int  # longest sequence of the model

    def triton(self) -> None:
        width, total = self.path.shape[1], self.slots.shape[0]
        self.launch(
            _inputs_kernel,
            self.source.shape[0] // width,
            total=total,
            stride_path=self.path.stride(0),
            WIDTH=width,
            QUERIES=self.queries,
            BLOCK_W=padded(width),
            BLOCK_Q=padded(self.queries),
            BLOCK_S=padded(total),
            num_warps=1,
        )


draft_inputs = public(DraftInputs)
