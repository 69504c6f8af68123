# SPDX-License-Identifier: Apache-2.0
"""How vLLM stores a target layer's keys and values."""

from __future__ import annotations

from typing import Any

import torch

from bastion_kernels import KVLayout

_FLOAT8 = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def float8(kv_cache_dtype: str) -> torch.dtype | None:
    """The float8 type of a cache with vLLM's setting `kv_cache_dtype`; None = the model's dtype."""
    return _FLOAT8.get(kv_cache_dtype)


def block_layout(layer: Any) -> KVLayout | None:
    """How the blocks of a layer's cache are packed; None = row by row."""
    layout_of = getattr(layer.impl, "cache_layout", None)
    return None if layout_of is None else layout_of(layer, layer.kv_cache)
