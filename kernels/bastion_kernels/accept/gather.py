# SPDX-License-Identifier: Apache-2.0
"""Rows of several matrices gathered by one index, in one launch.

    outs[i][m] = sources[i][rows[m]]      for every source i and every m with rows[m] >= 0

After acceptance the drafter must read the target's hidden states along the accepted path, not the
first rows of the tail: row d of its context is the node at depth d. The hidden states of several
layers share the same rows, so one launch moves them all: 2 * M * H bytes per source and byte of
its dtype, read once and written once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bastion_kernels.checks import check, version_for
from bastion_kernels.cpu.accept import gather_rows_cpu
from bastion_kernels.triton_or_none import tl, triton

__all__ = ["gather_rows", "gather_rows_reference", "gather_rows_triton"]

_BLOCK = 1024  # columns per program


def gather_rows_reference(sources: Sequence[Tensor], rows: Tensor, outs: Sequence[Tensor]) -> None:
    """One index per matrix; see `gather_rows`."""
    live = rows >= 0
    index = rows[live]
    for source, out in zip(sources, outs, strict=True):
        out[: rows.shape[0]][live] = source[index]


@triton.jit
def _gather_kernel(
    # tuples of [T, H_i], [M, H_i] (written) and their sizes
    sources,
    outs,
    # [M] int64
    rows_ptr,
    source_strides,
    out_strides,
    widths,
    BLOCK: tl.constexpr,
):
    """Copy BLOCK columns of one row of one matrix. Grid: (M, column blocks, matrices)."""
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + place)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    for i in tl.static_range(len(sources)):
        if (tl.program_id(2) == i) & (row >= 0):
            mask = column < widths[i]
            values = tl.load(sources[i] + row * source_strides[i] + column, mask=mask, other=0)
            tl.store(outs[i] + place * out_strides[i] + column, values, mask=mask)


def gather_rows_triton(sources: Sequence[Tensor], rows: Tensor, outs: Sequence[Tensor]) -> None:
    """The Triton kernel; see `gather_rows`."""
    widths = tuple(source.shape[1] for source in sources)
    _gather_kernel[(rows.shape[0], triton.cdiv(max(widths), _BLOCK), len(widths))](
        tuple(sources),
        tuple(outs),
        rows,
        tuple(source.stride(0) for source in sources),
        tuple(out.stride(0) for out in outs),
        widths,
        BLOCK=_BLOCK,
    )


def gather_rows(sources: Sequence[Tensor], rows: Tensor, outs: Sequence[Tensor]) -> None:
    """Write `outs[i][m] = sources[i][rows[m]]`; a row of -1 leaves its output row as it is.

    Args:
        sources: matrices `[T, H_i]`, any dtype, contiguous rows.
        rows: `[M]` int64, row numbers into the sources, or -1.
        outs: matrices `[>= M, H_i]` of the sources' dtypes, contiguous rows; must not overlap
            the sources.

    Raises:
        ValueError: shapes or strides do not fit together.
        TypeError: dtypes do not fit together.
    """
    op = "gather_rows"
    check(op, "rows", rows, (None,), torch.int64)
    if len(sources) != len(outs):
        raise ValueError(f"{op}: {len(sources)} sources but {len(outs)} outs")
    for source, out in zip(sources, outs, strict=True):
        check(op, "a source", source, (None, None), source.dtype)
        check(op, "its output", out, (None, source.shape[1]), source.dtype)
        if out.shape[0] < rows.shape[0]:
            raise ValueError(f"{op}: {rows.shape[0]} rows do not fit an output of {out.shape[0]}")
    if not sources or rows.shape[0] == 0:
        return
    launch = version_for(rows, gather_rows_triton, gather_rows_cpu, gather_rows_reference)
    launch(sources, rows, outs)
