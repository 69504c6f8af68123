# SPDX-License-Identifier: Apache-2.0
"""Which tree-capable backend stands in for the one vLLM chose for a target layer."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backend import AttentionBackend

from bastion_kernels import KVLayout


def packing(layer: Any) -> KVLayout | None:
    """How the blocks of a target layer's KV cache are packed; None = in rows."""
    of = getattr(layer.impl, "cache_layout", None)
    return None if of is None else of(layer, layer.kv_cache)


def tree_backend(backend: type[AttentionBackend]) -> type[AttentionBackend]:
    """The tree backend of the same device and KV cache layout.

    Raises:
        ValueError: there is none for `backend`.
    """
    name = backend.get_name()
    if name == "CPU_ATTN":
        from vllm_bastion.attention.cpu import TreeCPUAttentionBackend

        return TreeCPUAttentionBackend
    if name == "FLASH_ATTN":
        from vllm_bastion.attention.cuda import TreeFlashAttentionBackend

        return TreeFlashAttentionBackend
    raise ValueError(
        f"method 'bastion' has no tree attention for the backend {name}. "
        "Leave attention_config.backend unset, or set it to FLASH_ATTN."
    )
