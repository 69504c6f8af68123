# SPDX-License-Identifier: Apache-2.0
"""Matrix products of method "bastion" on a CPU with bf16 and int8 vectors, and no matrix registers.

vLLM's own (oneDNN) take two thirds as long again for 17 rows as for one there: they wait for
weights, then multiply, where both can be done at once. Tokens are as exact as with any other order
of a sum.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.library import Library

from bastion_kernels.cpu.linear import (
    can_multiply,
    linear_cpu,
    linear_int8_cpu,
    pack_weight,
)


@lru_cache
def has_linear() -> bool:
    """Whether this host's bf16 products are ours."""
    return can_multiply()


# Ops, so that vLLM's compiled models can call them.
_library = Library("vllm_bastion", "DEF")
_library.define("linear(Tensor x, Tensor packed, Tensor? bias) -> Tensor")
_library.define("linear_int8(Tensor x, Tensor values, Tensor start, Tensor scales) -> Tensor")


def _linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    out = _result(x, packed)
    linear_cpu(_rows(x), packed, bias, out)
    return out


def _linear_int8(x: Tensor, values: Tensor, start: Tensor, scales: Tensor) -> Tensor:
    out = _result(x, values)
    linear_int8_cpu(_rows(x), values, start, scales, out)
    return out


def _rows(x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _result(x: Tensor, packed: Tensor, *_: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], packed.shape[0] * 16)


_library.impl("linear", _linear, "CPU")
_library.impl("linear", _result, "Meta")
_library.impl("linear_int8", _linear_int8, "CPU")
_library.impl("linear_int8", _result, "Meta")


def install_linear(layer: Any, remove_weight: bool) -> bool:
    """Give a linear layer the product, as `dispatch_cpu_unquantized_gemm` does; whether it did."""
    weight = layer.weight
    if weight.is_meta or weight.ndim != 2 or weight.dtype != torch.bfloat16 or not has_linear():
        return False
    # A head shares its weight with the embeddings, and is asked for its own.
    packed = getattr(weight, "bastion_packed", None)
    if packed is None:
        packed = pack_weight(weight.data)
    if packed is None:
        return False
    weight.bastion_packed = packed
    layer.cpu_linear = lambda x, weight, bias: torch.ops.vllm_bastion.linear(x, packed, bias)
    if remove_weight:
        layer.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)
    return True
