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

from bastion_kernels.cpu.linear import Int8Weight, can_multiply_int8
from vllm_bastion.cpu import linear  # noqa: F401  (registers the op)

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def int8_wanted(drafter_weights: str, dtype: torch.dtype) -> bool:
    """Whether a drafter of this dtype multiplies in int8.

    drafter_weights: the setting `bastion_drafter_weights`.
    """
    return drafter_weights == "auto" and dtype == torch.bfloat16 and can_multiply_int8()


def takes_int8(weight: Tensor) -> bool:
    """Whether a weight [N, K] can be packed."""
    return weight.shape[0] % 16 == 0 and weight.shape[1] % 4 == 0


def int8_product(weight: Tensor) -> Product:
    """A function (x [.., K] bf16, ignored, bias) -> [.., N] bf16 over a packed copy of the weight.

    weight: [N, K] bf16, see `takes_int8`. Each of its rows has a scale, and so has each row of x.
    """
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
    if is_int8(layer):
        old, new = layer.cpu_linear, product
        for tensor, value in zip(old.parts, new.parts, strict=True):  # type: ignore[attr-defined]
            tensor.copy_(value)
    else:
        layer.cpu_linear = product
    layer.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)


def is_int8(layer: Any) -> bool:
    """Whether a layer multiplies in int8."""
    return hasattr(vars(layer).get("cpu_linear"), "parts")


def with_int8_head(model: nn.Module) -> None:
    """Make a drafter's head multiply in int8: a copy, if its weight is the target's."""
    head: Any = model.lm_head
    if not takes_int8(head.weight):
        return
    if not getattr(model, "has_own_lm_head", False):
        head = copy.copy(head)
    head.cpu_linear = int8_product(head.weight.data)
    model.lm_head = head
