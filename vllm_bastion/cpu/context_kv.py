# SPDX-License-Identifier: Apache-2.0
"""The keys and values that a drafter computes from accepted text, on a CPU.

vLLM computes them for all layers in one product, outside of its linear layers, and normalises the
keys of all layers in one call. On a CPU the op of that call applies the first layer's weights to
all layers.
"""

from __future__ import annotations

from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from vllm import _custom_ops as ops

# Layer that projects queries, keys and values -> where its rows of keys and values start, and their
# part of the product of all layers.
_fused_parts: WeakKeyDictionary[nn.Module, tuple[int, Tensor]] = WeakKeyDictionary()


def install(model: Any) -> None:
    """Replace `_normalize_context_k`.

    model: vLLM's DFlashQwen3Model or a similar one, with its weights loaded.
    """
    model._normalize_context_k = MethodType(normalize_context_k, model)
    cache = getattr(model, "_rope_cos_sin_cache", None)
    if cache is not None:  # vLLM would convert all positions in every step
        model._rope_cos_sin_cache = cache.to(model._hidden_norm_weight.dtype)
    weight = getattr(model, "_fused_kv_weight", None)
    if weight is None:
        return
    for layer, part in zip(model.layers, weight.chunk(len(model.layers)), strict=True):
        _fused_parts[layer.self_attn.qkv_proj] = layer.self_attn.q_size, part


def take_rows(layer: Any) -> None:
    """Copy a layer's new weights of keys and values to the product of all layers.

    Called before the layer's own product frees them.
    """
    if layer in _fused_parts:
        first, part = _fused_parts[layer]
        part.copy_(layer.weight.data[first:])


def normalize_context_k(self: Any, all_k: Tensor) -> Tensor:
    """Normalise keys [L, T, heads, d] by each layer's own weights."""
    out = torch.empty_like(all_k)
    for layer, weight in enumerate(self._k_norm_weights):
        ops.rms_norm(out[layer], all_k[layer], weight, self._rms_norm_eps)
    return out
