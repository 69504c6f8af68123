# SPDX-License-Identifier: Apache-2.0
"""Row gather against a loop over rows; outputs are poisoned first."""

from __future__ import annotations

import pytest
import torch
from op_helpers import DEVICE, POISON, runs
from torch import Tensor

from bastion_kernels import gather_rows

each_version = runs(gather_rows, gather_rows)


def check(run, sources: list[Tensor], rows: list[int], outs: list[Tensor]) -> None:
    run(sources, torch.tensor(rows, dtype=torch.int64, device=DEVICE), outs)
    for source, out in zip(sources, outs, strict=True):
        for m in range(out.shape[0]):
            row = rows[m] if m < len(rows) else -1
            expected = source[row] if row >= 0 else torch.full_like(out[m], POISON)
            assert torch.equal(out[m], expected)


@each_version
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int32])
def test_rows_of_several_sources(run, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    sources = [
        torch.randn(20, width, generator=g).mul(100).to(dtype).to(DEVICE)
        for width in (64, 64, 64, 5, 1500)
    ]
    outs = [torch.full((9, s.shape[1]), POISON, dtype=dtype, device=DEVICE) for s in sources]
    check(run, sources, [3, 3, -1, 19, 0, -1, 7], outs)


@each_version
def test_strided_rows(run) -> None:
    g = torch.Generator().manual_seed(1)
    source = torch.randn(12, 40, generator=g).to(DEVICE)[::2, 3:30]
    out = torch.full((4, 50), float(POISON), device=DEVICE)
    check(run, [source], [5, 0, 2], [out[:, 10:37]])
    out[:, 10:37] = POISON
    assert bool((out == POISON).all())


@each_version
def test_one_row_of_one_source(run) -> None:
    source = torch.arange(6, dtype=torch.float32, device=DEVICE)[None]
    check(run, [source], [0], [torch.full_like(source, POISON)])


def test_nothing_to_do() -> None:
    source = torch.zeros(3, 4, device=DEVICE)
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    gather_rows([source], none, [source.clone()])
    gather_rows([], none, [])
