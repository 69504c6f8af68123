# SPDX-License-Identifier: Apache-2.0
"""The int8 product against a float64 one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bastion_kernels.cpu.linear import can_multiply_int8

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or not can_multiply_int8(), reason="for CPUs that multiply int8"
)


@pytest.mark.parametrize(("rows", "inner", "outer"), [(1, 64, 96), (16, 192, 512), (3, 512, 4992)])
def test_product(rows: int, inner: int, outer: int) -> None:
    from vllm_bastion.cpu.linear import install_linear

    g = torch.Generator().manual_seed(rows)
    # Rows of all sizes, and one of zeros.
    sizes = torch.logspace(-3, 3, outer)[:, None]
    weight = (torch.randn(outer, inner, generator=g) * sizes).bfloat16()
    weight[outer // 2] = 0
    x = torch.randn(2, rows, inner, generator=g).bfloat16()
    bias = torch.randn(outer, generator=g).bfloat16()
    layer = nn.Module()
    layer.weight = nn.Parameter(weight, requires_grad=False)
    assert install_linear(layer, remove_weight=False, int8=True)
    product = layer.cpu_linear
    truth = x.double() @ weight.double().t()
    got, empty = product(x, weight[:0], None), weight[:0]
    assert got.shape == truth.shape and got.dtype == torch.bfloat16
    # Half a unit of the rows' largest 127th for each of both, and the last rounding.
    unit_x, unit_w = (t.double().abs().amax(-1, keepdim=True) / 127 for t in (x, weight))
    most = unit_x / 2 * weight.double().abs().sum(-1) + unit_w.t() / 2 * x.double().abs().sum(
        -1, keepdim=True
    )
    assert bool(((got.double() - truth).abs() <= most * 1.01 + truth.abs() / 128).all())
    # It is far less where signs differ.
    assert (got.double() - truth).norm() < 0.02 * truth.norm()
    assert bool((got[..., outer // 2] == 0).all())
    torch.testing.assert_close(product(x, empty, bias), got + bias)
