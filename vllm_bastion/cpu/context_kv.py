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

from bastion_kernels.cpu.linear import pack_weight
from vllm_bastion.cpu.linear import takes_weight

# Layer that projects queries, keys and values -> where its rows of keys and values start, and their
# part of the product of all layers.
_fused_parts: WeakKeyDictionary[nn.Module, tuple[int, Tensor]] = WeakKeyDictionary()


def install(model: Any) -> None:
    """Replace `_normalize_context_k`, and `_project_context_kv` where our product is used.

    model: vLLM's DFlashQwen3Model or a similar one, with its weights loaded.
    """
    model._normalize_context_k = MethodType(normalize_context_k, model)
    cache = getattr(model, "_rope_cos_sin_cache", None)
    if cache is not None:  # vLLM would convert all positions in every step
        model._rope_cos_sin_cache = cache.to(model._hidden_norm_weight.dtype)
    weight = getattr(model, "_fused_kv_weight", None)
    if weight is None:
        return
    parts = weight.chunk(len(model.layers))
    packed = pack_weight(weight) if takes_weight(weight) else None
    if packed is not None and pack_weight(parts[0]) is not None:
        model._fused_kv_weight = packed
        model._project_context_kv = MethodType(project_context_kv, model)
        parts = packed.chunk(len(model.layers))
    for layer, part in zip(model.layers, parts, strict=True):
        _fused_parts[layer.self_attn.qkv_proj] = layer.self_attn.q_size, part


def take_rows(layer: Any) -> None:
    """Copy a layer's new keys and values to the product of all layers, before they are packed."""
    if layer in _fused_parts:
        first, part = _fused_parts[layer]
        rows: Tensor | None = layer.weight.data[first:]
        if part.ndim == 3 and rows is not None:
            rows = pack_weight(rows)
        assert rows is not None  # packed as the part was
        part.copy_(rows)


def normalize_context_k(self: Any, all_k: Tensor) -> Tensor:
    """Normalise keys [L, T, heads, d] by each layer's own weights."""
    out = torch.empty_like(all_k)
    for layer, weight in enumerate(self._k_norm_weights):
        ops.rms_norm(out[layer], all_k[layer], weight, self._rms_norm_eps)
    return out


def project_context_kv(
    self: Any, states: Tensor, num_ctx: int, num_layers: int, num_kv_heads: int, head_dim: int
) -> tuple[Tensor, Tensor]:
    """Keys and values of all layers, [L, T, heads, d] each, from states [T, H], as vLLM does."""
    normed = torch.empty_like(states)
    ops.rms_norm(normed, states, self._hidden_norm_weight, self._rms_norm_eps)
    flat = torch.ops.vllm_bastion.linear(normed, self._fused_kv_weight, self._fused_kv_bias)
    both = flat.view(num_ctx, num_layers, 2, num_kv_heads, head_dim)
    keys, values = both.permute(2, 1, 0, 3, 4).contiguous()
    return keys, values
