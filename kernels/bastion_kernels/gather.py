# SPDX-License-Identifier: Apache-2.0
"""Rows of several matrices gathered by one index, in one launch.

    outs[i][m] = sources[i][rows[m]]      for every source i and every m with rows[m] >= 0

After acceptance the drafter must read the target's hidden states along the accepted path, not the
first rows of the tail: row d of its context is the node at depth d. The auxiliary hidden states of
several layers share the same rows, so one launch moves them all.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

__all__ = ["gather_rows", "gather_rows_reference"]


def _check(sources: Sequence[Tensor], rows: Tensor, outs: Sequence[Tensor]) -> None:
    if len(sources) != len(outs):
        raise ValueError(f"gather_rows: {len(sources)} sources but {len(outs)} outputs")
    if rows.dim() != 1:
        raise ValueError(f"gather_rows: rows must be 1-D, got shape {tuple(rows.shape)}")
    for source, out in zip(sources, outs, strict=True):
        if source.dim() != 2 or out.dim() != 2 or source.shape[1] != out.shape[1]:
            raise ValueError(
                "gather_rows: source and output must be [*, H] with one H, got "
                f"{tuple(source.shape)} and {tuple(out.shape)}"
            )
        if source.dtype != out.dtype:
            raise ValueError(f"gather_rows: dtypes differ: {source.dtype} and {out.dtype}")
        if out.shape[0] < rows.shape[0]:
            raise ValueError(f"gather_rows: {rows.shape[0]} rows but output has {out.shape[0]}")


def gather_rows_reference(sources: Sequence[Tensor], rows: Tensor, outs: Sequence[Tensor]) -> None:
    """The definition, in plain PyTorch; see `gather_rows`."""
    live = rows >= 0
    index = rows[live]
    for source, out in zip(sources, outs, strict=True):
        out[: rows.shape[0]][live] = source[index]


def gather_rows(sources: Sequence[Tensor], rows: Tensor, outs: Sequence[Tensor]) -> None:
    """Write `outs[i][m] = sources[i][rows[m]]`; a row of -1 leaves its output row as it is.

    Args:
        sources: matrices `[T, H_i]`, any dtype and strides.
        rows: `[M]` int64, row numbers into the sources, or -1.
        outs: matrices `[>= M, H_i]` of the sources' dtypes; must not overlap the sources.

    Raises:
        ValueError: shapes or dtypes do not fit together.
    """
    _check(sources, rows, outs)
    gather_rows_reference(sources, rows, outs)
