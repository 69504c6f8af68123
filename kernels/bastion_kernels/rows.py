# SPDX-License-Identifier: Apache-2.0
"""Small index arithmetic between the big ops, one launch each instead of several in PyTorch.

`bind_slots` and `bind_tails` name the request slot of every batch row, for the drafter and for the
target. `context_rows` lays out the rows of a verified batch that the drafter reads as its context:
of request r the rows in front of its root, then its accepted path, with d = i - rows_before[r],

    source[context_start[r] + i] = root + d             for d < 0
    source[context_start[r] + i] = root + path[r, d]    for d >= 0

and padding up to the number of rows that the host scheduled: the host does not know how many nodes
were accepted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bastion_kernels.op import Op, public
from bastion_kernels.triton_or_none import tl, triton

_BLOCK = 128


@triton.jit(
    do_not_specialize=["reqs"],
    # slices of longer buffers, which may start anywhere: one variant for all of them
    do_not_specialize_on_alignment=["idx_mapping_ptr", "cu_num_logits_ptr", "num_sampled_ptr"],
)
def _bind_kernel(
    idx_mapping_ptr,
    cu_num_logits_ptr,
    num_sampled_ptr,
    slots_ptr,
    tail_lens_ptr,
    base_rows_ptr,
    emitted_ptr,
    reqs,
    total,
    WITH_TAILS: tl.constexpr,
    WITH_TREES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (S / BLOCK,)."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = row < reqs
    slot = tl.load(idx_mapping_ptr + row, mask=live, other=-1).to(tl.int64)
    tl.store(slots_ptr + row, slot, mask=row < total)
    if WITH_TAILS:
        tail = tl.zeros([BLOCK], tl.int32)
        if WITH_TREES:
            end = tl.load(cu_num_logits_ptr + row + 1, mask=live, other=0)
            start = tl.load(cu_num_logits_ptr + row, mask=live, other=0)
            tail = tl.where(live & (end - start > 1), end - start, 0)
        tl.store(tail_lens_ptr + row, tail, mask=row < total)
    else:
        sampled = tl.load(num_sampled_ptr + row, mask=live, other=0)
        tl.store(emitted_ptr + slot, sampled, mask=live)
        if tl.program_id(0) == 0:
            tl.store(base_rows_ptr, tl.maximum(reqs, 1))


@triton.jit(
    do_not_specialize=["stride_path"],
    do_not_specialize_on_alignment=[
        "context_start_ptr",
        "rows_before_ptr",
        "query_start_loc_ptr",
        "cu_num_logits_ptr",
        "path_ptr",
        "num_sampled_ptr",
        "num_rejected_ptr",
        "context_rejected_ptr",
    ],
)
def _context_rows_kernel(
    context_start_ptr,
    rows_before_ptr,
    query_start_loc_ptr,
    cu_num_logits_ptr,
    path_ptr,
    positions_ptr,
    num_sampled_ptr,
    num_rejected_ptr,
    source_ptr,
    context_positions_ptr,
    context_rejected_ptr,
    stride_path,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (R, row blocks of the longest request)."""
    request = tl.program_id(0)
    start = tl.load(context_start_ptr + request)
    end = tl.load(context_start_ptr + request + 1)
    rows_before = tl.load(rows_before_ptr + request)
    tail = tl.load(cu_num_logits_ptr + request + 1) - tl.load(cu_num_logits_ptr + request)
    root = (tl.load(query_start_loc_ptr + request + 1) - tail).to(tl.int64)
    row = start + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    depth = row - start - rows_before
    path_row_ptr = path_ptr + request.to(tl.int64) * stride_path
    node = tl.load(path_row_ptr + depth, mask=(depth >= 0) & (depth < WIDTH), other=-1)
    source = root + tl.where(node >= 0, node, tl.minimum(depth, 0))
    tl.store(source_ptr + row, source, mask=row < end)
    tl.store(context_positions_ptr + row, tl.load(positions_ptr + root) + depth, mask=row < end)
    if tl.program_id(1) == 0:
        sampled = tl.load(num_sampled_ptr + request)
        rejected = tl.load(num_rejected_ptr + request)
        unaccepted = end - start - rows_before - sampled
        tl.store(context_rejected_ptr + request, tl.where(sampled > 0, unaccepted, rejected))


@dataclass(slots=True)
class BindSlots(Op):
    """Name the slots of the drafter's batch, and store how many tokens each has just emitted."""

    idx_mapping: Tensor
    """`[R]` int64 or int32, slot of every row; R may be 0."""
    num_sampled: Tensor
    """`[R]` int32, tokens that each row emitted."""
    slots: Tensor
    """`[S]` int64, written: the R slots, then -1."""
    base_rows: Tensor
    """0-d int32, written: max(R, 1)."""
    emitted: Tensor
    """`[S]` int32, written for the R slots: `num_sampled`."""

    def check(self) -> None:
        self.expect("idx_mapping", (None,), torch.int64, torch.int32)
        self.expect("num_sampled", (self.idx_mapping.shape[0],), torch.int32)
        self.expect("slots", (None,), torch.int64)
        self.expect("base_rows", (), torch.int32)
        self.expect("emitted", (self.slots.shape[0],), torch.int32)

    def reference(self) -> None:
        count = self.idx_mapping.shape[0]
        self.slots[:count] = self.idx_mapping
        self.slots[count:] = -1
        self.base_rows.fill_(max(count, 1))
        self.emitted[self.idx_mapping] = self.num_sampled

    def triton(self) -> None:
        _bind_kernel[(triton.cdiv(self.slots.shape[0], _BLOCK),)](
            self.idx_mapping,
            self.idx_mapping,
            self.num_sampled,
            self.slots,
            self.slots,
            self.base_rows,
            self.emitted,
            self.idx_mapping.shape[0],
            self.slots.shape[0],
            WITH_TAILS=False,
            WITH_TREES=False,
            BLOCK=_BLOCK,
        )


bind_slots = public(BindSlots, cpu="bastion_kernels.cpu.rows")


@dataclass(slots=True)
class BindTails(Op):
    """Name the slots of the target's batch, and how many rows of each request are a tree."""

    idx_mapping: Tensor
    """`[R]` int64 or int32, slot of every row; R may be 0."""
    cu_num_logits: Tensor | None
    """`[>= R + 1]` int32, first logits row of each request; None: no tree at all, or chains, which
    need no mask."""
    slots: Tensor
    """`[S]` int64, written: the R slots, then -1."""
    tail_lens: Tensor
    """`[S]` int32, written: rows of the tail, root included; 0 for a lone root (its slot may never
    have had a tree) and past the batch."""

    def check(self) -> None:
        total = self.slots.shape[0]
        self.expect("idx_mapping", (None,), torch.int64, torch.int32)
        if self.cu_num_logits is not None:
            self.expect("cu_num_logits", (None,), torch.int32)
        self.expect("slots", (total,), torch.int64)
        self.expect("tail_lens", (total,), torch.int32)

    def reference(self) -> None:
        count = self.idx_mapping.shape[0]
        self.slots[:count] = self.idx_mapping
        self.slots[count:] = -1
        self.tail_lens.zero_()
        if self.cu_num_logits is not None:
            tails = torch.diff(self.cu_num_logits[: count + 1])
            self.tail_lens[:count] = tails.masked_fill(tails == 1, 0)

    def triton(self) -> None:
        _bind_kernel[(triton.cdiv(self.slots.shape[0], _BLOCK),)](
            self.idx_mapping,
            self.idx_mapping if self.cu_num_logits is None else self.cu_num_logits,
            self.idx_mapping,
            self.slots,
            self.tail_lens,
            self.slots,
            self.slots,
            self.idx_mapping.shape[0],
            self.slots.shape[0],
            WITH_TAILS=True,
            WITH_TREES=self.cu_num_logits is not None,
            BLOCK=_BLOCK,
        )


bind_tails = public(BindTails, cpu="bastion_kernels.cpu.rows")


@dataclass(slots=True)
class ContextRows(Op):
    """Lay out the rows that the drafter reads as its context; see the module.

    Rows past the path's end repeat the root's row at the position they would have. They count as
    rejected.
    """

    context_start: Tensor
    """`[R + 1]` int32, first context row of each request."""
    rows_before: Tensor
    """`[R]` int32, context rows in front of the root."""
    query_start_loc: Tensor
    """`[R + 1]` int32, first row of each request in the target's batch."""
    cu_num_logits: Tensor
    """`[R + 1]` int32; the last `cu[r+1] - cu[r]` rows of a request are its tail."""
    path: Tensor
    """`[>= R, D + 1]` int32, nodes of the accepted path, -1 past its end."""
    positions: Tensor
    """`[T]` int64, position of every row of the target's batch, linear in a request."""
    num_sampled: Tensor
    """`[R]` int32, tokens emitted; 0: an unfinished prompt."""
    num_rejected: Tensor
    """`[R]` int32, copied for requests that emitted nothing."""
    source: Tensor
    """`[>= M]` int64, written: row of the target's batch, M = context_start[R]."""
    context_positions: Tensor
    """`[>= M]` int64, written."""
    context_rejected: Tensor
    """`[R]` int32, written: context rows from the root on that were not accepted."""
    max_rows: int
    """Most context rows of any request."""

    def check(self) -> None:
        reqs = self.num_sampled.shape[0]
        self.expect("context_start", (reqs + 1,), torch.int32)
        self.expect("query_start_loc", (reqs + 1,), torch.int32)
        self.expect("cu_num_logits", (reqs + 1,), torch.int32)
        for name in ("rows_before", "num_sampled", "num_rejected", "context_rejected"):
            self.expect(name, (reqs,), torch.int32)
        self.expect("path", (None, None), torch.int32)
        for name in ("positions", "source", "context_positions"):
            self.expect(name, (None,), torch.int64)

    def reference(self) -> None:
        """One row after the other."""
        for r, sampled in enumerate(self.num_sampled.tolist()):
            start, end = self.context_start[r : r + 2].tolist()
            tail = int(self.cu_num_logits[r + 1] - self.cu_num_logits[r])
            root = int(self.query_start_loc[r + 1]) - tail
            for row in range(start, end):
                depth = row - start - int(self.rows_before[r])
                node = int(self.path[r, depth]) if 0 <= depth < self.path.shape[1] else -1
                self.source[row] = root + (node if node >= 0 else min(depth, 0))
                self.context_positions[row] = self.positions[root] + depth
            tail_rows = end - start - int(self.rows_before[r])
            self.context_rejected[r] = tail_rows - sampled if sampled > 0 else self.num_rejected[r]

    def triton(self) -> None:
        _context_rows_kernel[(self.num_sampled.shape[0], triton.cdiv(self.max_rows, _BLOCK))](
            self.context_start,
            self.rows_before,
            self.query_start_loc,
            self.cu_num_logits,
            self.path,
            self.positions,
            self.num_sampled,
            self.num_rejected,
            self.source,
            self.context_positions,
            self.context_rejected,
            self.path.stride(0),
            WIDTH=self.path.shape[1],
            BLOCK=_BLOCK,
        )


context_rows = public(ContextRows, cpu="bastion_kernels.cpu.rows")
