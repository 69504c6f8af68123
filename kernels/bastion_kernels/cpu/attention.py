# SPDX-License-Identifier: Apache-2.0
"""Tree attention on a CPU, over a cache in the layout of vLLM's own CPU kernels.

A model calls it once per layer and step. What belongs to the layer and what belongs to the step is
put together once each, so a call only fills in where its rows are. The kernel is
`csrc/attention.cpp`.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

from bastion_kernels.attention.kv_layout import AMX, KVLayout
from bastion_kernels.cpu import library

__all__ = ["FORMATS", "AttentionLayer", "AttentionStep", "serves", "tree_attention_cpu"]

# Dtypes of queries, then of caches besides, as `Format` of csrc/attention.h numbers them. The
# kernel reads a float8 as a float16, 1/factor of its value.
FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_FLOAT8 = {torch.float8_e4m3fn: (3, 256.0), torch.float8_e5m2: (4, 1.0)}

_int, _address, _float = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float


class LayerArgs(ctypes.Structure):
    """`LayerArgs` of csrc/attention.h."""

    _fields_ = (
        ("heads", _int), ("kv_heads", _int), ("dim", _int), ("query_format", _int),
        ("cache", _address), ("cache_format", _int), ("blocks", _int), ("page", _int),
        ("cache_block", _int), ("cache_head", _int), ("layout", _int), ("tiles", _int),
        ("offsets", _address), ("window", _int), ("sinks", _address), ("scale", _float),
        ("softcap", _float), ("value_scale", _float),
    )  # fmt: skip


class StepArgs(ctypes.Structure):
    """`StepArgs` of csrc/attention.h."""

    _fields_ = (
        ("requests", _int), ("table", _address), ("table_row", _int), ("starts", _address),
        ("lengths", _address), ("tails", _address), ("slots", _address), ("bits", _address),
        ("bits_slots", _int), ("bits_slot", _int), ("bits_row", _int), ("nodes", _int),
        ("depths", _address), ("depths_slot", _int),
    )  # fmt: skip


class RowsArgs(ctypes.Structure):
    """`RowsArgs` of csrc/attention.h."""

    _fields_ = (
        ("threads", _int), ("query", _address), ("query_row", _int), ("query_head", _int),
        ("out", _address), ("out_row", _int), ("out_head", _int),
    )  # fmt: skip


def serves(query: torch.dtype, cache: torch.dtype) -> bool:
    """Whether the kernel takes queries and a cache of these dtypes, and can be compiled here."""
    return query in FORMATS and (cache == query or cache in _FLOAT8) and library.problem() is None


@lru_cache
def _rows(page: int, dim: int, stride: int) -> KVLayout:
    return KVLayout.rows(page, dim, stride)


class AttentionStep:
    """The requests of a step, for every layer; the arguments are as in `tree_attention`.

    The tensors are read at each call.
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
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    layout: KVLayout | None = None,
) -> None:
    """See `tree_attention`. Dtypes as in `serves`; a cache of rows if `layout` is None.

    Rows of a tail, and those of a causal run of at most 64 rows, get the same bits as on the same
    path in any other tree or chain.
    """
    layer = AttentionLayer(
        kv_cache, query.shape[1], scale, dtype=query.dtype, softcap=softcap, window=window,
        sinks=sinks, k_scale=1.0 if k_scale is None else float(k_scale),
        v_scale=1.0 if v_scale is None else float(v_scale), layout=layout,
    )  # fmt: skip
    tables = block_table, query_start_loc, seq_lens, tail_lens, slots, ancestor_bits, depths
    layer(AttentionStep(*tables), query, out)
