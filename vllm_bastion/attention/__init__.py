# SPDX-License-Identifier: Apache-2.0
"""Which tree-capable backend stands in for the one vLLM chose for a target layer."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backend import AttentionBackend

from bastion_kernels import KVLayout

_FLOAT8 = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def float8(kv_cache_dtype: str) -> torch.dtype | None:
    """What the bytes of a layer's KV cache are; None = numbers of the model's dtype."""
    return _FLOAT8.get(kv_cache_dtype)


def packing(layer: Any) -> KVLayout | None:
    """How the blocks of a target layer's KV cache are packed; None = in rows."""
    of = getattr(layer.impl, "cache_layout", None)
    return None if of is None else of(layer, layer.kv_cache)


def tree_backend(
    backend: type[AttentionBackend], kv_cache_dtype: str | None = None
) -> type[AttentionBackend]:
    """The tree backend of the same device and KV cache layout.

    Args:
        backend: what vLLM chose.
        kv_cache_dtype: of the layer.

    Raises:
        ValueError: there is none for `backend`.
    """
    name = backend.get_name()
    if name == "CPU_ATTN":
        from vllm_bastion.cpu.attention import TreeCPUAttentionBackend

        return TreeCPUAttentionBackend
    if name == "FLASH_ATTN":
        from vllm_bastion.attention.cuda import TreeFlashAttentionBackend

        return TreeFlashAttentionBackend
    if kv_cache_dtype is not None and float8(kv_cache_dtype) is not None:
        raise ValueError(
            f"method 'bastion' has no tree attention for the backend {name}, which vLLM takes for "
            f'kv_cache_dtype "{kv_cache_dtype}" on this device: set kv_cache_dtype to "auto"'
        )
    raise ValueError(
        f"method 'bastion' has no tree attention for the backend {name}. "
        "Leave attention_config.backend unset, or set it to FLASH_ATTN."
    )
