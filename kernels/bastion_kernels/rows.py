# SPDX-License-Identifier: Apache-2.0
"""Index arithmetic between the large ops: one launch each, instead of several in PyTorch.

`bind_slots` stores the request slot of every batch row, for the drafter and for the target.
`context_rows` lists the rows of a verified batch that become the drafter's context: for
request r the rows before its root, then its accepted path. With d = i - rows_before[r],

    source[context_start[r] + i] = root + d             for d < 0
    source[context_start[r] + i] = root + path[r, d]    for d >= 0

followed by padding up to the scheduled number of rows, because the host does not know how many
nodes were accepted. After `compact_caches`, context row i of a request has the slot of its row i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from bastion_kernels.bound import Launched
from bastion_kernels.op import Op, cdiv, public
from bastion_kernels.triton_or_none import tl, triton

_BLOCK = 128


@triton.jit(
    do_not_specialize=["R"],
    # slices that start anywhere in longer buffers: one variant for all alignments
    do_not_specialize_on_alignment=["idx_mapping", "cu_num_logits"],
)
def _bind_kernel(idx_mapping, cu_num_logits, slots, tail_lens, R, S, BLOCK: tl.constexpr):
    """Grid: (S / BLOCK,)."""
    i_b = tl.program_id(0)
    o_r = i_b * BLOCK + tl.arange(0, BLOCK)
    m_r = o_r < R
    b_slot = tl.load(idx_mapping + o_r, mask=m_r, other=-1).to(tl.int64)
    tl.store(slots + o_r, b_slot, mask=o_r < S)
    if tail_lens is not None:
        b_tail = tl.zeros([BLOCK], tl.int32)
        if cu_num_logits is not None:
            b_end = tl.load(cu_num_logits + o_r + 1, mask=m_r, other=0)
            b_start = tl.load(cu_num_logits + o_r, mask=m_r, other=0)
            b_tail = tl.where(m_r & (b_end - b_start > 1), b_end - b_start, 0)
        tl.store(tail_lens + o_r, b_tail, mask=o_r < S)


@triton.jit(
    do_not_specialize=["stride_path_r"],
    do_not_specialize_on_alignment=[
        "context_start",
        "rows_before",
        "query_start_loc",
        "cu_num_logits",
        "path",
        "num_sampled",
        "num_rejected",
        "context_positions",
        "context_rejected",
    ],
)
def _context_rows_kernel(
    context_start,
    rows_before,
    query_start_loc,
    cu_num_logits,
    path,
    positions,
    num_sampled,
    num_rejected,
    source,
    context_positions,
    context_rejected,
    # tuples of [T] int64 and [>= M] int64 (written), or None; variants by alignment
    slot_mappings,
    context_slots,
    stride_path_r,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (R, row blocks of the longest request)."""
    i_r = tl.program_id(0)
    start = tl.load(context_start + i_r)
    end = tl.load(context_start + i_r + 1)
    before = tl.load(rows_before + i_r)
    tail = tl.load(cu_num_logits + i_r + 1) - tl.load(cu_num_logits + i_r)
    root = (tl.load(query_start_loc + i_r + 1) - tail).to(tl.int64)
    sampled = tl.load(num_sampled + i_r)
    rejected = tl.where(sampled > 0, end - start - before - sampled, tl.load(num_rejected + i_r))
    i_b = tl.program_id(1)
    o_r = start + i_b * BLOCK + tl.arange(0, BLOCK)
    o_d = o_r - start - before
    p_path = path + i_r.to(tl.int64) * stride_path_r
    b_node = tl.load(p_path + o_d, mask=(o_d >= 0) & (o_d < WIDTH), other=-1)
    b_source = root + tl.where(b_node >= 0, b_node, tl.minimum(o_d, 0))
    tl.store(source + o_r, b_source, mask=o_r < end)
    b_position = tl.load(positions + root) + o_d
    if slot_mappings is not None:
        m_kept = o_r < end - rejected
        b_position = tl.where(m_kept, b_position, 0)
        o_slot = tl.load(query_start_loc + i_r) + o_r - start
        for i in tl.static_range(len(slot_mappings)):
            b_slot = tl.load(slot_mappings[i] + o_slot, mask=m_kept, other=-1)
            tl.store(context_slots[i] + o_r, b_slot, mask=o_r < end)
    tl.store(context_positions + o_r, b_position, mask=o_r < end)
    if i_b == 0:
        tl.store(context_rejected + i_r, rejected)


@dataclass(slots=True)
class BindSlots(Op):
    """Store the slots of a batch, and how many rows of each request are a tree."""

    idx_mapping: Annotated[Tensor, "[R] int64 or int32"]  # slot of every row; R may be 0
    slots: Annotated[Tensor, "[S] int64"]  # written: the R slots, then -1
    # Written: rows of the tail, root and nodes; 0 past the batch, and for a root without nodes (its
    # slot may never have had a tree). None: not written.
    tail_lens: Annotated[Tensor | None, "[S] int32"] = None
    # First logits row of each request; None: no trees, or only chains, which need no mask.
    cu_num_logits: Annotated[Tensor | None, "[>= R + 1] int32"] = None

    def triton(self) -> Launched | None:
        return self.launch(_bind_kernel, cdiv(self.slots.shape[0], _BLOCK), BLOCK=_BLOCK)


bind_slots = public(BindSlots, cpu="bastion_kernels.cpu.rows")


@dataclass(slots=True)
class ContextRows(Op):
    """List the rows of the drafter's context; see the module.

    Rows past the end of the path repeat the root's row, with linear positions. They count as
    rejected.
    """

    context_start: Annotated[Tensor, "[R + 1] int32"]  # first context row of each request
    rows_before: Annotated[Tensor, "[R] int32"]  # context rows before the root
    query_start_loc: Annotated[Tensor, "[R + 1] int32"]  # first row in the target's batch
    # First logits row of each request; its last `cu[r+1] - cu[r]` rows are its tail.
    cu_num_logits: Annotated[Tensor, "[R + 1] int32"]
    path: Annotated[Tensor, "[>= R, WIDTH] int32"]  # nodes of the accepted path, -1 past its end
    positions: Annotated[Tensor, "[T] int64"]  # of the target's rows, linear in a request
    num_sampled: Annotated[Tensor, "[R] int32"]  # tokens emitted; 0: an unfinished prompt
    num_rejected: Annotated[Tensor, "[R] int32"]  # copied for requests that emitted nothing
    # Written: row of the target's batch, of each of M = context_start[R] context rows or more.
    source: Annotated[Tensor, "[*] int64"]
    context_positions: Annotated[Tensor, "[*] int64"]  # written: of each context row
    context_rejected: Annotated[Tensor, "[R] int32"]  # written: rejected rows from the root on
    max_rows: int  # most context rows of any request
    # Of each cache: the slot of each target row.
    slot_mappings: Annotated[Sequence[Tensor], "G of [*] int64"] = ()
    # Of each cache, written: the slot of each of M context rows, -1 for rejected ones, whose
    # positions are 0 then.
    context_slots: Annotated[Sequence[Tensor], "G of [*] int64"] = ()

    def triton(self) -> None:
        self.launch(
            _context_rows_kernel,
            self.num_sampled.shape[0],
            cdiv(self.max_rows, _BLOCK),
            BLOCK=_BLOCK,
        )


context_rows = public(ContextRows, cpu="bastion_kernels.cpu.rows")
