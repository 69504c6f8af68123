# SPDX-License-Identifier: Apache-2.0
"""Tree attention on a CPU, over a cache in the layout of vLLM's own CPU kernels.

A model calls it once per layer and step. The arguments of a layer and those of a step are prepared
once each, so a call only fills in the addresses of its rows. The kernel is `csrc/attention.cpp`.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bastion_kernels.attention.kv_layout import AMX, KVLayout
from bastion_kernels.cpu import library

if TYPE_CHECKING:
    from bastion_kernels.attention import tree_attention as attention

__all__ = ["FORMATS", "AttentionLayer", "AttentionStep", "tree_attention_cpu"]

# `Format` of csrc/vectors.h: first the dtypes of queries and caches, then those of caches only. The
# kernel reads a float8 as a float16 of 1/factor of its value.
FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_FLOAT8 = {torch.float8_e4m3fn: (3, 256.0), torch.float8_e5m2: (4, 1.0)}

LayerArgs = library.struct(
    "LayerArgs",
    "heads kv_heads dim query_format *cache cache_format blocks page cache_block "
    "cache_head layout tiles *offsets window *sinks scale:float softcap:float "
    "value_scale:float",
)

StepArgs = library.struct(
    "StepArgs",
    "requests *table table_row *starts *lengths *tails *slots *bits bits_slots bits_slot "
    "bits_row nodes *depths depths_slot",
)

RowsArgs = library.struct("RowsArgs", "threads *query query_row query_head *out out_row out_head")


@lru_cache
def _rows(page: int, dim: int, stride: int) -> KVLayout:
    return KVLayout.rows(page, dim, stride)


class AttentionStep:
    """The requests of a step, for every layer; the arguments are as in `tree_attention`.

    Every call reads the tensors.
    """

    def __init__(
        self,
        block_table: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        tail_lens: Tensor,
        slots: Tensor,
        ancestor_bits: Tensor,
        depths: Tensor | None = None,
    ) -> None:
        # The arguments hold addresses only.
        self._tensors = (
            block_table, query_start_loc, seq_lens, tail_lens, slots, ancestor_bits, depths,
        )  # fmt: skip
        self.args = StepArgs(
            seq_lens.shape[0], block_table.data_ptr(), block_table.stride(0),
            query_start_loc.data_ptr(), seq_lens.data_ptr(), tail_lens.data_ptr(),
            slots.data_ptr(), ancestor_bits.data_ptr(), ancestor_bits.shape[0],
            *ancestor_bits.stride()[:2], ancestor_bits.shape[1],
            None if depths is None else depths.data_ptr(),
            0 if depths is None else depths.stride(0),
        )  # fmt: skip


class AttentionLayer:
    """A layer with its cache; the arguments are as in `tree_attention`.

    Args:
        kv_cache: of the queries' dtype, or of a float8.
        heads: Hq.
        dtype: of the queries.
        k_scale, v_scale: factors of a float8 cache's keys and values.
        layout: of the cache, of rows if None.
    """

    def __init__(
        self,
        kv_cache: Tensor,
        heads: int,
        scale: float,
        *,
        dtype: torch.dtype | None = None,
        softcap: float = 0.0,
        window: int = 0,
        sinks: Tensor | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        layout: KVLayout | None = None,
    ) -> None:
        dtype = kv_cache.dtype if dtype is None else dtype
        cache_format, factor = _FLOAT8.get(kv_cache.dtype) or (FORMATS[dtype], 1.0)
        blocks, kv_heads, page, dim = *kv_cache.shape[:3], kv_cache.shape[3] // 2
        if layout is None:
            layout = _rows(page, dim, kv_cache.stride(2))
        # The arguments hold addresses only.
        self.kv_cache, self._tensors = kv_cache, (layout.offsets, sinks)
        tiles = layout.kind == AMX and kv_cache.dtype == torch.bfloat16 and library.has_tiles()
        self._args = LayerArgs(
            heads, kv_heads, dim, FORMATS[dtype], kv_cache.data_ptr(), cache_format, blocks, page,
            *kv_cache.stride()[:2], layout.kind, tiles, layout.offsets.data_ptr(), window,
            None if sinks is None else sinks.data_ptr(), scale * k_scale * factor, softcap,
            v_scale * factor,
        )  # fmt: skip
        self._run = library.load().bastion_tree_attention

    def __call__(self, step: AttentionStep, query: Tensor, out: Tensor) -> None:
        """query: [T, Hq, d] of the layer's dtype, any strides; out: [T, Hq, d], written."""
        if query.stride(2) != 1:
            query = query.contiguous()
        result = out
        if out.stride(2) != 1:
            out = out.contiguous()
        rows = RowsArgs(
            torch.get_num_threads(), query.data_ptr(), *query.stride()[:2], out.data_ptr(),
            *out.stride()[:2],
        )  # fmt: skip
        self._run(ctypes.byref(self._args), ctypes.byref(step.args), ctypes.byref(rows))
        if out is not result:
            result.copy_(out)


def tree_attention_cpu(
    layer: attention.AttentionLayer, step: attention.AttentionStep, query: Tensor, out: Tensor
) -> None:
    """See `bastion_kernels.AttentionLayer`; the queries' dtype is one of `FORMATS`.

    The result of a row in a tail, or in a causal run of at most 64 rows, depends only on its path,
    bit for bit, not on the rest of the tree.
    """
    if query.dtype not in FORMATS:
        raise TypeError(f"tree_attention: a CPU has no kernel for {query.dtype} queries")
    k_scale, v_scale = (1.0 if x is None else float(x) for x in (layer.k_scale, layer.v_scale))
    prepared = AttentionLayer(
        layer.kv_cache, query.shape[1], layer.scale, dtype=query.dtype, softcap=layer.softcap,
        window=layer.window, sinks=layer.sinks, k_scale=k_scale, v_scale=v_scale,
        layout=layer.layout,
    )  # fmt: skip
    tables = step.block_table, step.query_start_loc, step.seq_lens, step.tail_lens, step.slots
    prepared(AttentionStep(*tables, step.ancestor_bits, step.depths), query, out)
