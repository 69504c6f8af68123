# SPDX-License-Identifier: Apache-2.0
"""The drafter's matrix products in int8, on a CPU that multiplies int8.

Reading weights is most of a drafter's pass over one block, and int8 halves them. What a drafter
guesses a little differently is verified like all else: the tokens are the target's in any case.

Left as loaded is what reads the target's hidden states (`fc`, and the keys and values of the
context): those have outliers, which one scale a row does not serve, and their error would stay.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from vllm import _custom_ops as ops

from bastion_kernels.cpu.linear import Int8Weight, round_rows
from vllm_bastion.cpu.linear import has_linear

_PRIMITIVES = 32  # shapes whose code oneDNN keeps, as in vLLM's own layers


def int8_wanted(drafter_weights: str, dtype: torch.dtype) -> bool:
    """Whether a drafter of this dtype multiplies in int8.

    drafter_weights: the setting `bastion_drafter_weights`.
    """
    return (
        drafter_weights == "auto"
        and dtype == torch.bfloat16
        and bool(ops._supports_onednn)
        and torch.cpu._is_vnni_supported()
    )


def int8_product(weight: Tensor) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """weight: [N, K] bf16, not kept -> (x [.., K] bf16, ignored, bias) -> [.., N] bf16.

    A scale for every row of the weight, and for every row of x when it comes.
    """
    if has_linear() and weight.shape[0] % 16 == 0 and weight.shape[1] % 4 == 0:
        return _our_product(weight)
    rounded, scales = round_rows(weight)
    handler = ops.create_onednn_scaled_mm(
        rounded.t(), scales, weight.dtype, True, False, _PRIMITIVES
    )

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        values, row_scales, _ = ops.onednn_scaled_int8_quant(rows)
        out = torch.empty(rows.shape[0], handler.n, dtype=x.dtype)
        ops.onednn_scaled_mm(handler, values, out, row_scales, None, None, None)
        out = out.view(*x.shape[:-1], handler.n)
        return out if bias is None else out + bias

    product.scales = scales  # type: ignore[attr-defined]  # oneDNN reads them where they are
    return product


def _our_product(weight: Tensor) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    packed = Int8Weight(weight)
    values, start, scales = packed.values, packed.start, packed.scales

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = torch.ops.vllm_bastion.linear_int8(x, values, start, scales)
        return out if bias is None else out + bias

    return product


def install_int8(layer: Any) -> None:
    """Give a linear layer of the drafter its product; its weight, which is packed now, goes."""
    weight = layer.weight
    layer.cpu_linear = int8_product(weight.data)
    layer.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)


def with_int8_head(model: nn.Module) -> None:
    """Give a drafter a head of its own over the weight that it shares with its target."""
    head: Any = copy.copy(model.lm_head)
    head.cpu_linear = int8_product(head.weight.data)
    model.lm_head = head
