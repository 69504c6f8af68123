# SPDX-License-Identifier: Apache-2.0
"""The best causal attention at hand on the shapes of tree attention, to compare with.

vLLM's FlashAttention (3 where the GPU has it, else 2) over the same paged cache; without vLLM the
flash_attn package, and without that PyTorch's, both over an unpaged copy of the cache, which is a
little easier than what tree attention has to do. Which one ran is said with the result.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

Make = Callable[[Tensor, Tensor], Callable[[], Tensor]]


def baseline(
    rows: int, length: int, reqs: int, block_table: Tensor, starts: Tensor, lengths: Tensor
) -> tuple[str, Make]:
    """Name of the baseline, and a function (query, kv_cache) -> call.

    Args:
        rows, length: query rows and cached rows of every request.
        block_table: `[R, *]` int32.
        starts: `[R+1]` int32, first row of each request.
        lengths: `[R]` int32, all `length`.
    """
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func, is_fa_version_supported

        version = 3 if is_fa_version_supported(3) else 2
        usable = version == 3 or is_fa_version_supported(2)
    except ImportError:
        usable = False
    if usable:
        return f"vLLM FlashAttention {version}, paged", _vllm(
            flash_attn_varlen_func, version, rows, length, block_table, starts, lengths
        )
    try:
        from flash_attn import flash_attn_varlen_func as packaged
    except ImportError:
        return "torch SDPA, unpaged", _sdpa(rows, length, reqs, block_table)
    return "flash_attn 2, unpaged", _flash_attn(packaged, rows, length, block_table, starts)


def _vllm(
    attend: Callable[..., Tensor],
    version: int,
    rows: int,
    length: int,
    block_table: Tensor,
    starts: Tensor,
    lengths: Tensor,
) -> Make:
    def make(query: Tensor, kv_cache: Tensor) -> Callable[[], Tensor]:
        keys, values = kv_cache.transpose(1, 2).split(query.shape[2], dim=-1)
        schedule = None
        if version == 3:
            from vllm.vllm_flash_attn import get_scheduler_metadata

            # once per step in vLLM, so not part of a layer's time
            schedule = get_scheduler_metadata(
                batch_size=lengths.shape[0], max_seqlen_q=rows, max_seqlen_k=length,
                num_heads_q=query.shape[1], num_heads_kv=kv_cache.shape[1],
                headdim=query.shape[2], cache_seqlens=lengths, qkv_dtype=query.dtype,
                cu_seqlens_q=starts, page_size=kv_cache.shape[2], causal=True,
            )  # fmt: skip
        out = torch.empty_like(query)
        return lambda: attend(
            q=query, k=keys, v=values, out=out, cu_seqlens_q=starts, max_seqlen_q=rows,
            seqused_k=lengths, max_seqlen_k=length, softmax_scale=query.shape[2] ** -0.5,
            causal=True, block_table=block_table, scheduler_metadata=schedule,
            fa_version=version,
        )  # fmt: skip

    return make


def _unpaged(kv_cache: Tensor, block_table: Tensor, length: int) -> Tensor:
    """`[R, Hkv, length, 2d]` copy of the cached rows."""
    pages = kv_cache[block_table[:, : -(-length // kv_cache.shape[2])].long()]
    return pages.transpose(1, 2).flatten(2, 3)[:, :, :length].contiguous()


def _flash_attn(
    attend: Callable[..., Tensor], rows: int, length: int, block_table: Tensor, starts: Tensor
) -> Make:
    def make(query: Tensor, kv_cache: Tensor) -> Callable[[], Tensor]:
        kv = _unpaged(kv_cache, block_table, length).transpose(1, 2).flatten(0, 1)
        keys, values = (part.contiguous() for part in kv.split(query.shape[2], dim=-1))
        key_starts = starts // rows * length
        return lambda: attend(query, keys, values, starts, key_starts, rows, length, causal=True)

    return make


def _sdpa(rows: int, length: int, reqs: int, block_table: Tensor) -> Make:
    def make(query: Tensor, kv_cache: Tensor) -> Callable[[], Tensor]:
        kv = _unpaged(kv_cache, block_table, length)
        keys, values = (part.contiguous() for part in kv.split(query.shape[2], dim=-1))
        group = query.shape[1] // keys.shape[1]
        # head counts must match for the causal bias: heads of a group become extra requests
        shape = (reqs, rows, keys.shape[1], group, query.shape[2])
        packed = query.view(shape).permute(0, 3, 2, 1, 4).flatten(0, 1).contiguous()
        keys = keys.repeat_interleave(group, 0)
        values = values.repeat_interleave(group, 0)
        bias = causal_lower_right(rows, length)
        return lambda: F.scaled_dot_product_attention(packed, keys, values, attn_mask=bias)

    return make
