# SPDX-License-Identifier: Apache-2.0
"""Rows of several matrices gathered by one index, in one launch.

    outs[i][m] = sources[i][rows[m]]      for every source i and every m with rows[m] >= 0

After acceptance the drafter reads the target's hidden states along the accepted path, not the first
rows of the tail: row d of its context is the node at depth d. The hidden states of several layers
share the same rows, so one launch moves them all. Every row is read once and written once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bastion_kernels.checks import check
from bastion_kernels.op import Op, public
from bastion_kernels.triton_or_none import tl, triton

_BLOCK = 1024  # columns per program


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


@dataclass(slots=True)
class GatherRows(Op):
    """Write `outs[i][m] = sources[i][rows[m]]`; a row of -1 leaves its output row as it is.

    Raises:
        ValueError: shapes or strides do not fit together.
        TypeError: dtypes do not fit together.
    """

    sources: Sequence[Tensor]
    """Matrices `[T, H_i]`, any dtype, contiguous rows."""
    rows: Tensor
    """`[M]` int64, row numbers into the sources, or -1."""
    outs: Sequence[Tensor]
    """Matrices `[>= M, H_i]` of the sources' dtypes, contiguous rows; must not overlap the
    sources."""

    def check(self) -> None:
        self.expect("rows", (None,), torch.int64)
        count = self.rows.shape[0]
        if len(self.sources) != len(self.outs):
            raise ValueError(f"{self.name}: {len(self.sources)} sources but {len(self.outs)} outs")
        for source, out in zip(self.sources, self.outs, strict=True):
            check(self.name, "a source", source, (None, None), source.dtype)
            check(self.name, "its output", out, (None, source.shape[1]), source.dtype)
            if out.shape[0] < count:
                raise ValueError(
                    f"{self.name}: {count} rows do not fit an output of {out.shape[0]}"
                )

    def reference(self) -> None:
        """One index per matrix."""
        live = self.rows >= 0
        index = self.rows[live]
        for source, out in zip(self.sources, self.outs, strict=True):
            out[: self.rows.shape[0]][live] = source[index]

    def triton(self) -> None:
        widths = tuple(source.shape[1] for source in self.sources)
        if not widths or self.rows.shape[0] == 0:
            return
        _gather_kernel[(self.rows.shape[0], triton.cdiv(max(widths), _BLOCK), len(widths))](
            tuple(self.sources),
            tuple(self.outs),
            self.rows,
            tuple(source.stride(0) for source in self.sources),
            tuple(out.stride(0) for out in self.outs),
            widths,
            BLOCK=_BLOCK,
        )


gather_rows = public(GatherRows, cpu="bastion_kernels.cpu.accept", device_of="rows")
