# SPDX-License-Identifier: Apache-2.0
"""Which rows a step has: small index arithmetic between the big ops, one launch each.

In PyTorch each of these is several launches over a few numbers.

`bind_slots` and `bind_tails` name the request slot of every batch row for the drafter and for the
target. `kept_rows` lays out what the drafter is to read of a verified batch: of request r the rows
in front of its root, then its accepted path, padded to the number of rows that the host allowed it

    source[kept_start[r] + i] = root + node,   node = path[r, i - before[r]], or i - before[r] < 0

because the host knows how many rows it scheduled and only the device how many were accepted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bastion_kernels.checks import check, version_for
from bastion_kernels.cpu.rows import bind_slots_cpu, bind_tails_cpu, kept_rows_cpu
from bastion_kernels.triton_or_none import tl, triton

__all__ = [
    "bind_slots",
    "bind_slots_reference",
    "bind_slots_triton",
    "bind_tails",
    "bind_tails_reference",
    "bind_tails_triton",
    "kept_rows",
    "kept_rows_reference",
    "kept_rows_triton",
]

_BLOCK = 128


def bind_slots_reference(
    idx_mapping: Tensor,
    num_sampled: Tensor,
    slots: Tensor,
    base_rows: Tensor,
    emitted: Tensor,
) -> None:
    """See `bind_slots`."""
    count = idx_mapping.shape[0]
    slots[:count] = idx_mapping
    slots[count:] = -1
    base_rows.fill_(max(count, 1))
    emitted[idx_mapping] = num_sampled


def bind_tails_reference(
    idx_mapping: Tensor,
    cu_num_logits: Tensor | None,
    slots: Tensor,
    tail_lens: Tensor,
) -> None:
    """See `bind_tails`."""
    count = idx_mapping.shape[0]
    slots[:count] = idx_mapping
    slots[count:] = -1
    tail_lens.zero_()
    if cu_num_logits is not None:
        tails = torch.diff(cu_num_logits[: count + 1])
        tail_lens[:count] = tails.masked_fill(tails == 1, 0)


def kept_rows_reference(
    kept_start: Tensor,
    before: Tensor,
    query_start_loc: Tensor,
    cu_num_logits: Tensor,
    path: Tensor,
    positions: Tensor,
    num_sampled: Tensor,
    num_rejected: Tensor,
    source: Tensor,
    kept_positions: Tensor,
    kept_rejected: Tensor,
    max_rows: int,
) -> None:
    """One row after the other; see `kept_rows`."""
    for r, sampled in enumerate(num_sampled.tolist()):
        start, end = kept_start[r : r + 2].tolist()
        tail = int(cu_num_logits[r + 1] - cu_num_logits[r])
        root = int(query_start_loc[r + 1]) - tail
        for row in range(start, end):
            depth = row - start - int(before[r])
            node = int(path[r, depth]) if 0 <= depth < path.shape[1] else -1
            source[row] = root + (node if node >= 0 else min(depth, 0))
            kept_positions[row] = positions[root] + depth
        kept_tail = end - start - int(before[r])
        kept_rejected[r] = kept_tail - sampled if sampled > 0 else num_rejected[r]


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
        "kept_start_ptr",
        "before_ptr",
        "query_start_loc_ptr",
        "cu_num_logits_ptr",
        "path_ptr",
        "num_sampled_ptr",
        "num_rejected_ptr",
        "kept_rejected_ptr",
    ],
)
def _kept_rows_kernel(
    kept_start_ptr,
    before_ptr,
    query_start_loc_ptr,
    cu_num_logits_ptr,
    path_ptr,
    positions_ptr,
    num_sampled_ptr,
    num_rejected_ptr,
    source_ptr,
    kept_positions_ptr,
    kept_rejected_ptr,
    stride_path,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (R, row blocks of the longest request)."""
    request = tl.program_id(0)
    start = tl.load(kept_start_ptr + request)
    end = tl.load(kept_start_ptr + request + 1)
    before = tl.load(before_ptr + request)
    tail = tl.load(cu_num_logits_ptr + request + 1) - tl.load(cu_num_logits_ptr + request)
    root = (tl.load(query_start_loc_ptr + request + 1) - tail).to(tl.int64)
    row = start + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    depth = row - start - before
    path_row_ptr = path_ptr + request.to(tl.int64) * stride_path
    node = tl.load(path_row_ptr + depth, mask=(depth >= 0) & (depth < WIDTH), other=-1)
    source = root + tl.where(node >= 0, node, tl.minimum(depth, 0))
    tl.store(source_ptr + row, source, mask=row < end)
    tl.store(kept_positions_ptr + row, tl.load(positions_ptr + root) + depth, mask=row < end)
    if tl.program_id(1) == 0:
        sampled = tl.load(num_sampled_ptr + request)
        rejected = tl.load(num_rejected_ptr + request)
        kept = end - start - before - sampled
        tl.store(kept_rejected_ptr + request, tl.where(sampled > 0, kept, rejected))


def bind_slots_triton(
    idx_mapping: Tensor,
    num_sampled: Tensor,
    slots: Tensor,
    base_rows: Tensor,
    emitted: Tensor,
) -> None:
    """The Triton kernel; see `bind_slots`."""
    _bind_kernel[(triton.cdiv(slots.shape[0], _BLOCK),)](
        idx_mapping,
        idx_mapping,
        num_sampled,
        slots,
        slots,
        base_rows,
        emitted,
        idx_mapping.shape[0],
        slots.shape[0],
        WITH_TAILS=False,
        WITH_TREES=False,
        BLOCK=_BLOCK,
    )


def bind_tails_triton(
    idx_mapping: Tensor,
    cu_num_logits: Tensor | None,
    slots: Tensor,
    tail_lens: Tensor,
) -> None:
    """The Triton kernel; see `bind_tails`."""
    _bind_kernel[(triton.cdiv(slots.shape[0], _BLOCK),)](
        idx_mapping,
        idx_mapping if cu_num_logits is None else cu_num_logits,
        idx_mapping,
        slots,
        tail_lens,
        slots,
        slots,
        idx_mapping.shape[0],
        slots.shape[0],
        WITH_TAILS=True,
        WITH_TREES=cu_num_logits is not None,
        BLOCK=_BLOCK,
    )


def kept_rows_triton(
    kept_start: Tensor,
    before: Tensor,
    query_start_loc: Tensor,
    cu_num_logits: Tensor,
    path: Tensor,
    positions: Tensor,
    num_sampled: Tensor,
    num_rejected: Tensor,
    source: Tensor,
    kept_positions: Tensor,
    kept_rejected: Tensor,
    max_rows: int,
) -> None:
    """The Triton kernel; see `kept_rows`."""
    _kept_rows_kernel[(num_sampled.shape[0], triton.cdiv(max_rows, _BLOCK))](
        kept_start,
        before,
        query_start_loc,
        cu_num_logits,
        path,
        positions,
        num_sampled,
        num_rejected,
        source,
        kept_positions,
        kept_rejected,
        path.stride(0),
        WIDTH=path.shape[1],
        BLOCK=_BLOCK,
    )


def bind_slots(
    idx_mapping: Tensor,
    num_sampled: Tensor,
    slots: Tensor,
    base_rows: Tensor,
    emitted: Tensor,
) -> None:
    """Name the slots of the drafter's batch, and note what each of them has just emitted.

    Args:
        idx_mapping: `[R]` int64 or int32, slot of every row; R may be 0.
        num_sampled: `[R]` int32, tokens that each row emitted.
        slots: `[S]` int64, written: the R slots, then -1.
        base_rows: 0-d int32, written: max(R, 1).
        emitted: `[S]` int32, written for the R slots: `num_sampled`.
    """
    op = "bind_slots"
    check(op, "idx_mapping", idx_mapping, (None,), torch.int64, torch.int32)
    check(op, "num_sampled", num_sampled, (idx_mapping.shape[0],), torch.int32)
    check(op, "slots", slots, (None,), torch.int64)
    check(op, "base_rows", base_rows, (), torch.int32)
    check(op, "emitted", emitted, (slots.shape[0],), torch.int32)
    run = version_for(slots, bind_slots_triton, bind_slots_cpu, bind_slots_reference)
    run(idx_mapping, num_sampled, slots, base_rows, emitted)


def bind_tails(
    idx_mapping: Tensor,
    cu_num_logits: Tensor | None,
    slots: Tensor,
    tail_lens: Tensor,
) -> None:
    """Name the slots of the target's batch, and how many rows of each request are a tree.

    Args:
        idx_mapping: `[R]` int64 or int32, slot of every row; R may be 0.
        cu_num_logits: `[>= R + 1]` int32, first logits row of each request; None: no tree at
            all, or chains, which need no mask.
        slots: `[S]` int64, written: the R slots, then -1.
        tail_lens: `[S]` int32, written: rows of the tail, root included; 0 for a lone root
            (its slot may never have had a tree) and past the batch.
    """
    op, total = "bind_tails", slots.shape[0]
    check(op, "idx_mapping", idx_mapping, (None,), torch.int64, torch.int32)
    if cu_num_logits is not None:
        check(op, "cu_num_logits", cu_num_logits, (None,), torch.int32)
    check(op, "slots", slots, (total,), torch.int64)
    check(op, "tail_lens", tail_lens, (total,), torch.int32)
    run = version_for(slots, bind_tails_triton, bind_tails_cpu, bind_tails_reference)
    run(idx_mapping, cu_num_logits, slots, tail_lens)


def kept_rows(
    kept_start: Tensor,
    before: Tensor,
    query_start_loc: Tensor,
    cu_num_logits: Tensor,
    path: Tensor,
    positions: Tensor,
    num_sampled: Tensor,
    num_rejected: Tensor,
    source: Tensor,
    kept_positions: Tensor,
    kept_rejected: Tensor,
    max_rows: int,
) -> None:
    """Lay out the rows that the drafter reads; see the module.

    Rows past the path's end repeat the root's hidden state at the position that they would have;
    they are counted as rejected.

    Args:
        kept_start: `[R + 1]` int32, first kept row of each request.
        before: `[R]` int32, kept rows in front of the root.
        query_start_loc: `[R + 1]` int32, first row of each request in the target's batch.
        cu_num_logits: `[R + 1]` int32; the last `cu[r+1] - cu[r]` rows of a request are its tail.
        path: `[>= R, D + 1]` int32, nodes of the accepted path, -1 past its end.
        positions: `[T]` int64, position of every row of the target's batch, linear in a request.
        num_sampled: `[R]` int32, tokens emitted; 0: an unfinished prompt.
        num_rejected: `[R]` int32, kept for requests that emitted nothing.
        source: `[>= M]` int64, written: row of the target's batch, M = kept_start[R].
        kept_positions: `[>= M]` int64, written.
        kept_rejected: `[R]` int32, written: kept rows of the tail that were not accepted.
        max_rows: most kept rows of any request.
    """
    op, reqs = "kept_rows", num_sampled.shape[0]
    check(op, "kept_start", kept_start, (reqs + 1,), torch.int32)
    check(op, "query_start_loc", query_start_loc, (reqs + 1,), torch.int32)
    check(op, "cu_num_logits", cu_num_logits, (reqs + 1,), torch.int32)
    for name, tensor in (
        ("before", before),
        ("num_sampled", num_sampled),
        ("num_rejected", num_rejected),
        ("kept_rejected", kept_rejected),
    ):
        check(op, name, tensor, (reqs,), torch.int32)
    check(op, "path", path, (None, None), torch.int32)
    for name, tensor in (
        ("positions", positions),
        ("source", source),
        ("kept_positions", kept_positions),
    ):
        check(op, name, tensor, (None,), torch.int64)
    run = version_for(source, kept_rows_triton, kept_rows_cpu, kept_rows_reference)
    run(
        kept_start,
        before,
        query_start_loc,
        cu_num_logits,
        path,
        positions,
        num_sampled,
        num_rejected,
        source,
        kept_positions,
        kept_rejected,
        max_rows,
    )
