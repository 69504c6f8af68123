# SPDX-License-Identifier: Apache-2.0
"""Matrix products of method "bastion" in bf16 on CPUs.

On a CPU with bf16 and int8 vectors but no matrix registers, vLLM's own product (oneDNN) takes 1.7
times as long for 17 rows as for one, because it loads weights and multiplies in turn. Ours overlaps
the two. The order of the sums differs, as it does between any two libraries. Small weights fit the
CPU's caches and keep vLLM's product. So do all weights on other CPUs.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.library import Library
from torch.utils.weak import WeakTensorKeyDictionary

from bastion_kernels.cpu.linear import (
    can_multiply,
    linear_cpu,
    linear_int8_cpu,
    pack_weight,
)

# A smaller weight keeps vLLM's product. The limit separates the tiny pairs from real models.
MIN_WEIGHT_BYTES = 1 << 20


def takes_weight(weight: Tensor) -> bool:
    """Whether products with this weight are ours."""
    return (
        not weight.is_meta
        and weight.ndim == 2
        and weight.dtype == torch.bfloat16
        and weight.nbytes >= MIN_WEIGHT_BYTES
        and can_multiply()
    )


# Registered as ops, so that vLLM's compiled models can call them.
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


# Packed weights that layers share: a head has the weight of its embeddings and installs its own
# product.
_packed: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()


def install_linear(layer: Any, remove_weight: bool) -> bool:
    """Set a linear layer's product, as vLLM's `dispatch_cpu_unquantized_gemm` does.

    Returns False, and changes nothing, if the weight is not one that our product takes. A layer
    that has a packed weight of this shape keeps it, with the new values: compiled code reads it.
    """
    weight = layer.weight
    if not takes_weight(weight):
        return False
    packed = _packed.get(weight)
    if packed is None:
        packed = pack_weight(weight.data)
    if packed is None:
        return False
    earlier = packed_weight(layer)
    if earlier is not None and earlier.shape == packed.shape:
        packed = earlier.copy_(packed)
    if not remove_weight:
        _packed[weight] = packed

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = torch.ops.vllm_bastion.linear(x, packed, bias)
        return out

    product.packed = packed  # type: ignore[attr-defined]
    layer.cpu_linear = product
    if remove_weight:
        layer.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)
    return True


def forget_shared() -> None:
    """Let layers that share a weight pack it anew: its values have changed."""
    _packed.clear()


def packed_weight(layer: Any) -> Tensor | None:
    """The packed weight that a layer multiplies by; None if its product is not ours."""
    return getattr(vars(layer).get("cpu_linear"), "packed", None)
