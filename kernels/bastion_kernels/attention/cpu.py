# SPDX-License-Identifier: Apache-2.0
"""Tree attention on a CPU, over a cache in whatever layout vLLM's own CPU kernels keep it."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from bastion_kernels.attention.cpu_layout import AMX, VECTOR, KVLayout
from bastion_kernels.native import HAVE_NUMBA, on_all_threads, scratch

if HAVE_NUMBA:
    from bastion_kernels.attention.cpu_kernel import CALL, SHORT_CHUNK, compiled, scratch_bytes
    from bastion_kernels.machine import has_tiles

__all__ = ["FORMS", "tree_attention_cpu"]

# The dtypes served here, by what the loops call them.
FORMS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@lru_cache
def _has_tiles() -> bool:
    """Whether there are matrix registers, and this process may use them from now on."""
    return has_tiles() and torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()


@lru_cache
def _rows(page: int, dim: int, stride: int) -> KVLayout:
    return KVLayout.rows(page, dim, stride)


def tree_attention_cpu(
    query: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    tail_lens: Tensor,
    slots: Tensor,
    ancestor_bits: Tensor,
    scale: float,
    out: Tensor,
    *,
    softcap: float = 0.0,
    window: int = 0,
    sinks: Tensor | None = None,
    depths: Tensor | None = None,
    layout: KVLayout | None = None,
) -> None:
    """See `tree_attention`. A cache of the queries' dtype, one of rows if `layout` is None.

    Rows of a tail, and those of a causal run of at most `SHORT_CHUNK`, get bit for bit what they
    get on the same path in any other tree or chain.
    """
    heads, dim = query.shape[1:]
    kv_heads, page = kv_cache.shape[1:3]
    if layout is None:
        layout = _rows(page, dim, kv_cache.stride(2))
    query, result = query.contiguous() if query.stride(2) != 1 else query, out
    if out.stride(2) != 1:
        out = out.contiguous()
    tiles = layout.kind == AMX and query.dtype == torch.bfloat16 and _has_tiles()
    threads = torch.get_num_threads()
    limit = max(SHORT_CHUNK, ancestor_bits.shape[1])
    need = scratch_bytes(dim, limit)
    memory = scratch(torch.uint8, 64 + threads * need)
    address = -(-memory.data_ptr() // 64) * 64
    counters = np.zeros(2, np.int64)
    told = np.zeros(1, CALL)
    told[0] = (
        counters.ctypes.data, address, need, threads, seq_lens.shape[0], heads // kv_heads,
        kv_heads, dim, page, limit, layout.kind == VECTOR and query.dtype == torch.float32,
        query.data_ptr(), *query.stride()[:2], out.data_ptr(), *out.stride()[:2],
        kv_cache.data_ptr(), *kv_cache.stride()[:2], layout.places.data_ptr(),
        block_table.data_ptr(), block_table.stride(0), query_start_loc.data_ptr(),
        seq_lens.data_ptr(), tail_lens.data_ptr(), slots.data_ptr(), ancestor_bits.data_ptr(),
        *ancestor_bits.stride()[:2], 0 if depths is None else depths.data_ptr(),
        0 if depths is None else depths.stride(0), window,
        0 if sinks is None else sinks.data_ptr(), FORMS[query.dtype], tiles, scale, softcap,
    )  # fmt: skip
    on_all_threads(compiled(query.element_size()), told.ctypes.data, threads)
    if out is not result:
        result.copy_(out)
