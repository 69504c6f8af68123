# SPDX-License-Identifier: Apache-2.0
"""The drafter's matrix products in int8, on a CPU that multiplies int8.

A drafter's pass over one block mostly reads weights, and int8 halves them. Rounding changes a few
of its guesses, which are verified like all others, so the emitted tokens stay the target's.

Weights that multiply the target's hidden states (`fc`, and the context's keys and values) keep the
checkpoint's dtype. Those states have outliers that one scale per row rounds badly, and the error
would remain in the drafter's KV cache.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from vllm import _custom_ops as ops

from bastion_kernels.cpu.linear import Int8Weight, linear_int8_cpu, round_rows
from vllm_bastion.cpu.linear import has_linear

# Columns that oneDNN multiplies at once. Given 151,936 of them, its time grows with the rows of x:
# 240 rows of 1,024 take 73 ms, and 20 ms in parts (two-core Xeon with AMX).
_PART = 16384
_PRIMITIVES = 32  # shapes whose compiled code oneDNN caches, as in vLLM's own layers


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


def _takes_ours(weight: Tensor) -> bool:
    """Whether an int8 product with this weight [N, K] is ours, not oneDNN's."""
    return has_linear() and weight.shape[0] % 16 == 0 and weight.shape[1] % 4 == 0


def int8_product(weight: Tensor) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """A function (x [.., K] bf16, ignored, bias) -> [.., N] bf16 over a packed copy of the weight.

    weight: [N, K] bf16. Each of its rows has a scale, and so has each row of x.
    """
    if _takes_ours(weight):
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

    product.scales = scales  # type: ignore[attr-defined]  # oneDNN reads them in place
    return product


def _our_product(weight: Tensor) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    packed = Int8Weight(weight)
    values, start, scales = parts = packed.values, packed.start, packed.scales

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = torch.ops.vllm_bastion.linear_int8(x, values, start, scales)
        return out if bias is None else out + bias

    product.parts = parts  # type: ignore[attr-defined]
    return product


def install_int8(layer: Any) -> None:
    """Make a linear layer of the drafter multiply in int8, and free its own weight.

    A layer that has such a product keeps its tensors, with new values: compiled code reads them.
    """
    weight = layer.weight
    product = int8_product(weight.data)
    earlier = vars(layer).get("cpu_linear")
    old, new = getattr(earlier, "parts", None), getattr(product, "parts", None)
    if old is not None and new is not None:
        for tensor, value in zip(old, new, strict=True):
            tensor.copy_(value)
    else:
        layer.cpu_linear = product
    layer.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)


def is_int8(layer: Any) -> bool:
    """Whether a layer multiplies in int8."""
    return getattr(vars(layer).get("cpu_linear"), "__module__", None) == __name__


class Int8Head:
    """x [.., K] bf16 -> logits [.., N] bf16.

    Args:
        weight: [N, K] bf16, copied. Each of its rows has a scale, and so has each row of x.
    """

    def __init__(self, weight: Tensor) -> None:
        self._columns = len(weight)
        self._ours = Int8Weight(weight) if _takes_ours(weight) else None
        if self._ours is not None:
            return
        rounded, self._scales = round_rows(weight)  # oneDNN reads the scales in place
        self._handlers = [
            ops.create_onednn_scaled_mm(part.t(), scales, weight.dtype, True, False, _PRIMITIVES)
            for part, scales in zip(rounded.split(_PART), self._scales.split(_PART), strict=True)
        ]

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out = x.new_empty(len(rows), self._columns)
        if self._ours is not None:
            linear_int8_cpu(rows, self._ours.values, self._ours.start, self._ours.scales, out)
        else:
            self._multiply_in_parts(rows, out)
        out = out.view(*x.shape[:-1], self._columns)
        return out if bias is None else out + bias

    def _multiply_in_parts(self, rows: Tensor, out: Tensor) -> None:
        values, row_scales, _ = ops.onednn_scaled_int8_quant(rows)
        for handler, columns in zip(self._handlers, out.split(_PART, dim=1), strict=True):
            part = torch.empty(columns.shape, dtype=out.dtype)  # oneDNN's results are contiguous
            ops.onednn_scaled_mm(handler, values, part, row_scales, None, None, None)
            columns.copy_(part)


def with_int8_head(model: nn.Module) -> None:
    """Make a drafter's head multiply in int8: a copy, if its weight is the target's."""
    head: Any = model.lm_head
    if not getattr(model, "has_own_lm_head", False):
        head = copy.copy(head)
    head.cpu_linear = Int8Head(head.weight.data)
    model.lm_head = head
