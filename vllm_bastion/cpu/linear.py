# SPDX-License-Identifier: Apache-2.0
"""Matrix products of method "bastion" in bf16 on CPUs.

On a CPU with bf16 and int8 vectors but no matrix registers, vLLM's own product (oneDNN) takes 1.7
times as long for 17 rows as for one, because it loads weights and multiplies in turn. Ours overlaps
the two. The order of the sums differs, as it does between any two libraries. Small weights fit the
CPU's caches and keep vLLM's product. So do all weights on other CPUs; with matrix registers, a head
reuses the memory of its result.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.library import Library
from torch.utils.weak import WeakTensorKeyDictionary
from vllm import _custom_ops as ops
from vllm.model_executor.layers.utils import check_cpu_sgl_kernel

from bastion_kernels.cpu.linear import (
    can_multiply,
    linear_cpu,
    linear_int8_cpu,
    pack_weight,
)

# A smaller weight keeps vLLM's product. The limit separates the tiny pairs from real models.
MIN_WEIGHT_BYTES = 1 << 20
# Rows of logits for which memory is always reserved.
_KEPT_ROWS = 256
PRIMITIVES = 32  # shapes whose compiled code oneDNN caches, as in vLLM's own layers


@lru_cache
def has_linear() -> bool:
    """Whether this host multiplies bf16 weights by our product."""
    return can_multiply()


def takes_weight(weight: Tensor) -> bool:
    """Whether products with this weight are ours."""
    return (
        not weight.is_meta
        and weight.ndim == 2
        and weight.dtype == torch.bfloat16
        and weight.nbytes >= MIN_WEIGHT_BYTES
        and has_linear()
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


class Room:
    """Memory for the logits of a head, which its next product overwrites.

    Logits are the largest tensors of a step. The C library maps allocations of more than 32 MiB
    afresh each time: 240 rows of 151,936 in bf16 then take 57 ms instead of 35 (two-core Xeon with
    AMX).
    """

    def __init__(self, columns: int) -> None:
        # Pages that are never written take no memory.
        self._kept = torch.empty(_KEPT_ROWS * columns, dtype=torch.bfloat16)

    def of(self, rows: int, columns: int) -> Tensor:
        """[rows, columns] bf16, contiguous and uninitialised."""
        size = rows * columns
        if size > len(self._kept):
            return self._kept.new_empty(rows, columns)
        return self._kept[:size].view(rows, columns)


def install_head(layer: Any) -> bool:
    """Set the product of a bf16 head or of embeddings; its result is valid until the next call.

    Returns False, and changes nothing, unless the CPU has matrix registers, where this was timed,
    and vLLM would use oneDNN.
    """
    weight = layer.weight
    if (
        weight.is_meta
        or weight.dtype != torch.bfloat16
        or not (ops._supports_onednn and torch.cpu._is_amx_tile_supported())
        or check_cpu_sgl_kernel(*weight.shape, weight.dtype)
    ):
        return False
    handler, room = ops.create_onednn_mm(weight.data.t(), PRIMITIVES), Room(len(weight))

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = _rows(x)
        out = room.of(len(rows), handler.n)
        torch.ops._C.onednn_mm(out, rows, bias, handler.handler_tensor)
        return out.view(*x.shape[:-1], out.shape[1])

    layer.cpu_linear = product
    return True


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

    room = None if remove_weight else Room(len(weight))

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if room is None:
            out: Tensor = torch.ops.vllm_bastion.linear(x, packed, bias)
            return out
        rows = _rows(x)
        out = room.of(len(rows), packed.shape[0] * 16)
        linear_cpu(rows, packed, bias, out)
        return out.view(*x.shape[:-1], out.shape[1])

    product.packed = packed  # type: ignore[attr-defined]
    layer.cpu_linear = product
    if remove_weight:
        layer.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)
    return True


def packed_weight(layer: Any) -> Tensor | None:
    """The packed weight that a layer multiplies by; None if its product is not ours."""
    return getattr(vars(layer).get("cpu_linear"), "packed", None)
