# SPDX-License-Identifier: Apache-2.0
"""Rows of several matrices gathered by one index, in one launch.

    outs[i][m] = sources[i][rows[m]]      for every source i and every m with rows[m] >= 0

After acceptance the drafter needs the target's hidden states along the accepted path, of several
layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from bastion_kernels.op import Op, cdiv, public
from bastion_kernels.triton_or_none import tl, triton

_BLOCK = 1024  # columns per program


@triton.jit
def _gather_kernel(
    # tuples of [T, H_i], [M, H_i] (written) and their sizes
    sources,
    outs,
    # [M] int64
    rows,
    stride_sources_t,
    stride_outs_m,
    widths,
    BLOCK: tl.constexpr,
):
    """Copy BLOCK columns of one row of one matrix. Grid: (M, column blocks, matrices)."""
    i_m = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + i_m)
    i_c = tl.program_id(1)
    o_c = i_c * BLOCK + tl.arange(0, BLOCK)
    i_s = tl.program_id(2)
    for i in tl.static_range(len(sources)):
        if (i_s == i) & (row >= 0):
            m_c = o_c < widths[i]
            b_values = tl.load(sources[i] + row * stride_sources_t[i] + o_c, mask=m_c, other=0)
            tl.store(outs[i] + i_m * stride_outs_m[i] + o_c, b_values, mask=m_c)


@dataclass(slots=True)
class GatherRows(Op):
    """Write `outs[i][m] = sources[i][rows[m]]`; a row of -1 leaves its output row as it is."""

    sources: Annotated[Sequence[Tensor], "N of [T, *]"]  # matrices of H_i columns, any dtype
    rows: Annotated[Tensor, "[M] int64"]  # row numbers into the sources, or -1
    # Matrices of as many columns and of their dtypes; must not overlap them.
    outs: Annotated[Sequence[Tensor], "N of [>= M, *]"]

    def check(self) -> None:
        Op.check(self)
        kinds, wanted = (
            [(t.shape[1], t.dtype) for t in each] for each in (self.outs, self.sources)
        )
        if kinds != wanted:
            raise ValueError(f"{self.name}: outs must have columns {wanted}, got {kinds}")

    def triton(self) -> None:
        widths = tuple(source.shape[1] for source in self.sources)
        self.launch(
            _gather_kernel,
            self.rows.shape[0],
            cdiv(max(widths, default=0), _BLOCK),
            len(widths),
            widths=widths,
            BLOCK=_BLOCK,
        )


gather_rows = public(GatherRows, cpu="bastion_kernels.cpu.accept")
