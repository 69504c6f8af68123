# SPDX-License-Identifier: Apache-2.0
"""Products of a few rows against float64 ones."""

from __future__ import annotations

import pytest
import torch
from op_helpers import using_threads

from bastion_kernels.cpu.linear import can_multiply, can_multiply_int8, linear_cpu, pack_weight

pytestmark = pytest.mark.skipif(not can_multiply(), reason="for CPUs whose product is ours")


# More than 24 rows (AVX2: 6) take several passes, more than 4096 of K two parts, 3000 rows two
# blocks.
@pytest.mark.parametrize("rows", [1, 2, 17, 24, 25, 33, 65, 300, 3000])
@pytest.mark.parametrize(("outer", "inner"), [(16, 2), (160, 66), (1024, 192), (48, 9000)])
@pytest.mark.parametrize("biased", [False, True])
def test_product(rows: int, outer: int, inner: int, biased: bool) -> None:
    g = torch.Generator().manual_seed(rows * outer)
    weight = torch.randn(outer, inner, generator=g).bfloat16()
    bias = torch.randn(outer, generator=g).bfloat16() if biased else None
    # Rows that lie apart.
    x = torch.randn(rows, inner + 8, generator=g).bfloat16()[:, :inner]
    packed = pack_weight(weight)
    assert packed is not None
    got = linear_cpu(x, packed, bias)
    truth = x.double() @ weight.double().t()
    sizes = x.double().abs() @ weight.double().abs().t()
    if bias is not None:
        truth, sizes = truth + bias.double(), sizes + bias.double().abs()
    # A bf16's rounding of what comes out, and fp32's of so many terms.
    assert bool(((got.double() - truth).abs() <= truth.abs() / 256 + sizes * 2e-6).all())


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_does_not_depend_on_those_beside_it(threads: int) -> None:
    g = torch.Generator().manual_seed(5)
    packed = pack_weight(torch.randn(352, 6000, generator=g).bfloat16())
    assert packed is not None
    x = torch.randn(70, 6000, generator=g).bfloat16()
    alone = torch.cat([linear_cpu(row[None], packed, None) for row in x])
    with using_threads(threads):
        for rows in (2, 17, 49, 70):
            assert torch.equal(linear_cpu(x[-rows:], packed, None), alone[-rows:])


def test_rows_of_any_layout() -> None:
    packed = pack_weight(torch.randn(32, 64).bfloat16())
    assert packed is not None
    x = torch.randn(6, 64).bfloat16()
    expected = linear_cpu(x, packed, None)
    assert torch.equal(linear_cpu(x[2], packed, None), expected[2])
    assert torch.equal(linear_cpu(x.view(2, 3, 64), packed, None), expected.view(2, 3, 32))
    # Contiguous for PyTorch, although the stride of its dimension of size 1 is that of all rows.
    assert torch.equal(linear_cpu(x[None].transpose(0, 1), packed, None)[:, 0], expected)
    swapped = linear_cpu(x.view(2, 3, 64).transpose(0, 1), packed, None)
    assert torch.equal(swapped, expected.view(2, 3, 32).transpose(0, 1))
    assert torch.equal(linear_cpu(x.t().contiguous().t(), packed, None), expected)


@pytest.mark.skipif(not can_multiply_int8(), reason="for CPUs that multiply int8")
@pytest.mark.parametrize("rows", [1, 16, 25, 65, 3000])
@pytest.mark.parametrize(("outer", "inner"), [(16, 4), (1024, 192), (48, 9000)])
def test_int8(rows: int, outer: int, inner: int) -> None:
    g = torch.Generator().manual_seed(rows * outer)
    sizes = torch.logspace(-3, 3, outer)[:, None]
    given = (torch.randn(outer, inner, generator=g) * sizes).bfloat16()
    kept = pack_weight(given, int8=True)
    assert kept is not None and kept.scales is not None
    x = torch.randn(rows, inner + 8, generator=g).bfloat16()[:, :inner]
    x[-1] = 0
    got = linear_cpu(x, kept, None)
    # The whole numbers that are to be multiplied; their sums are exact in float64.
    weight = kept.values.view(outer // 16, inner // 4, 16, 4).transpose(1, 2).reshape(outer, inner)
    top = x.float().abs().amax(1, keepdim=True)
    whole = (x.float() * torch.where(top > 0, torch.tensor(127) / top, 0)).round()
    truth = (whole.double() @ weight.double().t()) * (top / 127) * kept.scales
    assert bool(((got.double() - truth).abs() <= truth.abs() / 250).all())
    assert bool((got[-1] == 0).all())
    rounding = (weight * kept.scales.double()[:, None] - given.double()).abs()
    assert bool((rounding <= 0.501 * kept.scales[:, None]).all())
    bias = torch.randn(outer, generator=g).bfloat16()
    assert torch.equal(linear_cpu(x, kept, bias), got + bias)


def test_numbers_that_are_none() -> None:
    weight = torch.eye(16).bfloat16()
    packed = pack_weight(weight)
    assert packed is not None
    x = torch.tensor([[torch.inf, torch.nan, 3.4e38, -torch.inf, *[0.0] * 12]]).bfloat16()
    got = linear_cpu(x, packed, None)
    assert torch.equal(got.isnan(), (x.float() @ weight.float()).isnan())


def test_sizes_that_are_left_to_others() -> None:
    assert pack_weight(torch.zeros(24, 64, dtype=torch.bfloat16)) is None
    assert pack_weight(torch.zeros(32, 63, dtype=torch.bfloat16)) is None
