# SPDX-License-Identifier: Apache-2.0
"""The CUDA adapter in an engine on the CPU: vLLM's FlashAttention backend without its kernels.

The backend's Python is vLLM's own: metadata, cache layout, the order of its calls. Three of its
kernels exist on a GPU only and are replaced by PyTorch. The tree kernel is our Triton kernel in
Triton's interpreter, with the plan and the workspace that it has on a GPU.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import torch
import torch.nn.functional as F

from tests.e2e.cuda_graphs import kernel


@kernel
def varlen_attention(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    **_: Any,
) -> None:
    """FlashAttention over a paged cache: q [T, Hq, d]; k and v [blocks, block_size, Hkv, d].

    The factors `[R, Hkv]` scale float8 numbers and are equal within a layer.
    """
    if k.dtype == torch.float8_e4m3fn:
        assert q.dtype == k.dtype, "FlashAttention 3 takes one dtype"
        factors = [x.flatten()[0] for x in (q_descale, k_descale, v_descale) if x is not None]
        q, k, v = (x.to(out.dtype) * f for x, f in zip((q, k, v), factors, strict=True))
    starts, lengths = cu_seqlens_q.tolist(), seqused_k.tolist()
    for r, length in enumerate(lengths):
        rows = slice(starts[r], starts[r + 1])
        count = rows.stop - rows.start
        if count == 0:
            continue
        blocks = block_table[r, : -(-length // k.shape[1])].long()
        keys, values = (cache[blocks].flatten(0, 1)[:length].transpose(0, 1) for cache in (k, v))
        mask = torch.ones(count, length, dtype=torch.bool)
        if causal:
            mask = mask.tril(length - count)
        out[rows] = F.scaled_dot_product_attention(
            q[rows].transpose(0, 1), keys, values, mask, scale=softmax_scale, enable_gqa=True
        ).transpose(0, 1)


@kernel
def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    *scales: torch.Tensor,
) -> None:
    """Write keys and values [T, Hkv, d] to their slots; -1 is not written."""
    real = slot_mapping >= 0
    slots, size = slot_mapping[real], key_cache.shape[1]
    for rows, cache, scale in zip((key, value), (key_cache, value_cache), scales, strict=True):
        rows = rows[: len(real)][real]
        if kv_cache_dtype.startswith("fp8"):
            rows = (rows / scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        cache[slots // size, slots % size] = rows


def install() -> None:
    """Use it in every attention layer of this process, together with `cuda_graphs.install`."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends import flash_attn

    import bastion_kernels

    # All of our ops use their Triton kernels, in the interpreter.
    for module in pkgutil.walk_packages(bastion_kernels.__path__, "bastion_kernels."):
        found = importlib.import_module(module.name)
        if hasattr(found, "on_gpu"):
            found.on_gpu = lambda tensor: True
    # As on a Hopper GPU.
    flash_attn.get_flash_attn_version = lambda *args, **kwargs: 3
    flash_attn.flash_attn_supports_kv_cache_dtype = lambda *args, **kwargs: True
    flash_attn.get_scheduler_metadata = lambda **kwargs: None
    flash_attn.flash_attn_varlen_func = varlen_attention
    flash_attn.reshape_and_cache_flash = reshape_and_cache
    CpuPlatform.get_attn_backend_cls = classmethod(
        lambda cls, *args, **kwargs: f"{flash_attn.__name__}.FlashAttentionBackend"
    )
