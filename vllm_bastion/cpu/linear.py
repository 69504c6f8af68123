# SPDX-License-Identifier: Apache-2.0
"""Matrix products of method "bastion" on CPUs: in bf16, and the drafter's in int8.

On a CPU with bf16 vectors but no matrix registers, vLLM's own bf16 product (oneDNN) takes 1.7 times
as long for 17 rows as for one, because it loads weights and multiplies in turn. Ours overlaps the
two. On a CPU with AVX2 alone vLLM has PyTorch's product, which takes 6 times as long for 8 rows as
for one; ours 1.8 times. The order of the sums differs, as it does between any two libraries. Small
weights fit the CPU's caches and keep vLLM's product. So do all weights on other CPUs.

A drafter's pass over one block mostly reads weights, and int8 halves them. Rounding changes a few
of its guesses, which are verified like all others, so the emitted tokens stay the target's. Weights
that multiply the target's hidden states (`fc`, and the context's keys and values) keep the
checkpoint's dtype. Those states have outliers that one scale per row rounds badly, and the error
would remain in the drafter's KV cache.
"""

from __future__ import annotations

import copy
from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from bastion_kernels.cpu.linear import (
    PackedWeight,
    can_multiply,
    can_multiply_int8,
    linear_cpu,
    pack_weight,
)

# A smaller weight keeps vLLM's product. The limit separates the tiny pairs from real models.
MIN_WEIGHT_BYTES = 1 << 19


def takes_weight(weight: Tensor) -> bool:
    """Whether bf16 products with this weight are ours."""
    return (
        not weight.is_meta
        and weight.ndim == 2
        and weight.dtype == torch.bfloat16
        and weight.nbytes >= MIN_WEIGHT_BYTES
        and can_multiply()
    )


def int8_wanted(drafter_weights: str, dtype: torch.dtype) -> bool:
    """Whether a drafter of this dtype multiplies in int8.

    drafter_weights: the setting `bastion_drafter_weights`.
    """
    return drafter_weights == "auto" and dtype == torch.bfloat16 and can_multiply_int8()


# Packed weights that layers share: a head has the weight of its embeddings and installs its own
# product.
_packed: MutableMapping[Tensor, PackedWeight] = WeakTensorKeyDictionary()


def install_linear(layer: Any, remove_weight: bool, *, int8: bool = False) -> bool:
    """Set a linear layer's product, as vLLM's `dispatch_cpu_unquantized_gemm` does.

    Returns False, and changes nothing, if the weight is not one that our product takes. A layer
    that has such a product keeps its packed weight, with the new values: compiled code reads it.
    """
    weight = layer.weight
    packed = None if int8 else _packed.get(weight)
    if packed is None and (int8 or takes_weight(weight)):
        packed = pack_weight(weight.data, int8=int8)
    if packed is None:
        return False
    earlier = packed_weight(layer)
    if earlier is not None and earlier.values.dtype == packed.values.dtype:
        for tensor, value in zip(earlier, packed, strict=True):
            if tensor is not None and value is not None:
                tensor.copy_(value)
        packed = earlier
    if not (int8 or remove_weight):
        _packed[weight] = packed
    own = packed

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return linear_cpu(x, own, bias)

    product.packed = packed  # type: ignore[attr-defined]
    layer.cpu_linear = product
    if remove_weight:
        layer.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)
    return True


def packed_weight(layer: Any) -> PackedWeight | None:
    """The packed weight that a layer multiplies by; None if its product is not ours."""
    return getattr(vars(layer).get("cpu_linear"), "packed", None)


def is_int8(layer: Any) -> bool:
    """Whether a layer multiplies in int8."""
    packed = packed_weight(layer)
    return packed is not None and packed.scales is not None


def with_int8_head(model: nn.Module) -> None:
    """Make a drafter's head multiply in int8: a copy, if its weight is the target's."""
    head: Any = model.lm_head
    if not getattr(model, "has_own_lm_head", False):
        head = copy.copy(head)
    if install_linear(head, remove_weight=False, int8=True):
        model.lm_head = head


def repack(*models: nn.Module) -> None:
    """Pack the weights that layers of these models have kept, after an update in place.

    vLLM packs a layer again when it loads its weight. Heads remain: they share their weight with
    the embeddings, and vLLM loads it there only. vLLM's configuration must be the current one, as
    while a model is loaded.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    _packed.clear()
    for model in models:
        for layer in model.modules():
            weight = getattr(layer, "weight", None)
            if "cpu_linear" not in vars(layer) or not isinstance(weight, Tensor):
                continue
            if weight.numel() == 0:  # packed when it was loaded
                continue
            if not install_linear(layer, remove_weight=False, int8=is_int8(layer)):
                dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
