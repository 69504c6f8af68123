# SPDX-License-Identifier: Apache-2.0
"""Tree attention on a CPU, over a cache in the layout of vLLM's own CPU kernels.

The kernel is `csrc/attention.cpp`.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bastion_kernels.attention.kv_layout import AMX, KVLayout
from bastion_kernels.cpu import library

if TYPE_CHECKING:
    from bastion_kernels.attention.tree_attention import AttentionLayer, AttentionStep

# `Format` of csrc/vectors.h: first the dtypes of queries and caches, then those of caches only. The
# kernel reads a float8 as a float16 of 1/factor of its value.
FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_FLOAT8 = {torch.float8_e4m3fn: (3, 256.0), torch.float8_e5m2: (4, 1.0)}

_LayerArgs, _StepArgs, _RowsArgs = map(library.struct, ("LayerArgs", "StepArgs", "RowsArgs"))


def tree_attention_cpu(
    layer: AttentionLayer, step: AttentionStep, query: Tensor, out: Tensor
) -> None:
    """See `bastion_kernels.AttentionLayer`; the queries' dtype is one of `FORMATS`.

    The result of a row in a tail, or in a causal run of at most 64 rows, depends only on its path,
    bit for bit, not on the rest of the tree.
    """
    if query.dtype not in FORMATS:
        raise TypeError(f"tree_attention: a CPU has no kernel for {query.dtype} queries")
    if layer.native is None:
        layer.native = _layer_args(layer, query)
    if step.native is None:
        step.native = _step_args(step)
    if query.stride(2) != 1:
        query = query.contiguous()
    result = out
    if out.stride(2) != 1:
        out = out.contiguous()
    rows_args = _RowsArgs(
        torch.get_num_threads(), query.data_ptr(), *query.stride()[:2], out.data_ptr(),
        *out.stride()[:2],
    )  # fmt: skip
    library.load().bastion_tree_attention(
        ctypes.byref(layer.native), ctypes.byref(step.native), ctypes.byref(rows_args)
    )
    if out is not result:
        result.copy_(out)


def _layer_args(layer: AttentionLayer, query: Tensor) -> ctypes.Structure:
    cache = layer.kv_cache
    cache_format, factor = _FLOAT8.get(cache.dtype) or (FORMATS[query.dtype], 1.0)
    k_scale, v_scale = (1.0 if x is None else float(x) for x in (layer.k_scale, layer.v_scale))
    blocks, kv_heads, page, dim = *cache.shape[:3], cache.shape[3] // 2
    layout = layer.layout or KVLayout.rows(page, dim, cache.stride(2))
    tiles = layout.kind == AMX and cache.dtype == torch.bfloat16 and library.has_tiles()
    return _LayerArgs(
        query.shape[1], kv_heads, dim, FORMATS[query.dtype], cache.data_ptr(), cache_format, blocks,
        page, *cache.stride()[:2], layout.kind, tiles, layout.offsets.data_ptr(), layer.window,
        None if layer.sinks is None else layer.sinks.data_ptr(), layer.scale * k_scale * factor,
        layer.softcap, v_scale * factor,
    )  # fmt: skip


def _step_args(step: AttentionStep) -> ctypes.Structure:
    bits, depths = step.ancestor_bits, step.depths
    return _StepArgs(
        step.seq_lens.shape[0], step.block_table.data_ptr(), step.block_table.stride(0),
        step.query_start_loc.data_ptr(), step.seq_lens.data_ptr(), step.tail_lens.data_ptr(),
        step.slots.data_ptr(), bits.data_ptr(), bits.shape[0], *bits.stride()[:2], bits.shape[1],
        None if depths is None else depths.data_ptr(), 0 if depths is None else depths.stride(0),
    )  # fmt: skip
