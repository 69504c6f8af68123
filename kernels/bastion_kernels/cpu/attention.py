# SPDX-License-Identifier: Apache-2.0
"""Tree attention on a CPU, over a cache in whatever layout vLLM's own CPU kernels keep it.

A model asks once per layer and step. What a step says to all layers and what a layer is in all
steps are each put together once, so that a call writes no more than where its rows lie.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from bastion_kernels.attention.kv_layout import AMX, VECTOR, KVLayout
from bastion_kernels.cpu.native import HAVE_NUMBA, on_all_threads, scratch

if HAVE_NUMBA:
    from bastion_kernels.cpu.attention_kernel import (
        CALL,
        OF_LAYER,
        OF_ROWS,
        OF_STEP,
        SHORT_CHUNK,
        compiled,
        scratch_bytes,
    )
    from bastion_kernels.cpu.machine import has_tiles

__all__ = ["FORMS", "AttentionLayer", "AttentionStep", "serves", "tree_attention_cpu"]

# The dtypes of queries served here, by what the loops call them, and of caches besides: how they
# are called, and what a number is of what they read.
FORMS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_BYTES = {torch.float8_e4m3fn: (3, 256.0), torch.float8_e5m2: (4, 1.0)}


def serves(query: torch.dtype, cache: torch.dtype) -> bool:
    """Whether there are loops for queries and a cache of these dtypes."""
    return query in FORMS and (cache == query or cache in _BYTES)


@lru_cache
def _has_tiles() -> bool:
    """Whether there are matrix registers, and this process may use them from now on."""
    return has_tiles() and torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()


@lru_cache
def _rows(page: int, dim: int, stride: int) -> KVLayout:
    return KVLayout.rows(page, dim, stride)


class AttentionStep:
    """The requests of a step, for every layer; the arguments are as in `tree_attention`.

    What they hold is read by each call.
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
        self.tail_limit = max(SHORT_CHUNK, ancestor_bits.shape[1])
        # Only their addresses are told.
        self._kept = (
            block_table, query_start_loc, seq_lens, tail_lens, slots, ancestor_bits, depths,
        )  # fmt: skip
        self.told = np.array([
            seq_lens.shape[0], self.tail_limit, block_table.data_ptr(), block_table.stride(0),
            query_start_loc.data_ptr(), seq_lens.data_ptr(), tail_lens.data_ptr(),
            slots.data_ptr(), ancestor_bits.data_ptr(), *ancestor_bits.stride()[:2],
            0 if depths is None else depths.data_ptr(), 0 if depths is None else depths.stride(0),
        ])  # fmt: skip


class AttentionLayer:
    """A layer with its cache; the arguments are as in `tree_attention`. One thread calls it.

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
        form, read = _BYTES.get(kv_cache.dtype) or (FORMS[dtype], 1.0)
        kv_heads, page, dim = *kv_cache.shape[1:3], kv_cache.shape[3] // 2
        if layout is None:
            layout = _rows(page, dim, kv_cache.stride(2))
        self.kv_cache, self._kept, self._dim = kv_cache, (layout, sinks), dim
        tiles = layout.kind == AMX and kv_cache.dtype == torch.bfloat16 and _has_tiles()
        self._run = compiled(dtype.itemsize, kv_cache.element_size())
        self._call, self._counters = np.zeros(1, CALL), np.zeros(2, np.int64)
        self._told = self._call.view(np.int64)
        self._address = self._call.ctypes.data
        self._needs: dict[int, int] = {}
        call, by_channel = self._call[0], layout.kind == VECTOR
        self._told[OF_LAYER] = (
            self._counters.ctypes.data, heads // kv_heads, kv_heads, dim, page, by_channel,
            kv_cache.data_ptr(), *kv_cache.stride()[:2], layout.places.data_ptr(), window,
            0 if sinks is None else sinks.data_ptr(), FORMS[dtype], form, tiles,
        )  # fmt: skip
        call["scale"], call["softcap"] = scale * k_scale * read, softcap
        call["value_scale"] = v_scale * read

    def __call__(self, step: AttentionStep, query: Tensor, out: Tensor) -> None:
        """query: [T, Hq, d] of the layer's dtype, any strides; out: [T, Hq, d], written."""
        if query.stride(2) != 1:
            query = query.contiguous()
        result = out
        if out.stride(2) != 1:
            out = out.contiguous()
        threads, limit = torch.get_num_threads(), step.tail_limit
        need = self._needs.get(limit)
        if need is None:
            need = self._needs[limit] = scratch_bytes(self._dim, limit)
        memory = scratch(torch.uint8, 64 + threads * need)
        self._counters.fill(0)
        told = self._told
        told[OF_STEP] = step.told
        rows, heads, _ = query.stride()
        out_rows, out_heads, _ = out.stride()
        told[OF_ROWS] = (
            -(-memory.data_ptr() // 64) * 64, need, threads, query.data_ptr(), rows, heads,
            out.data_ptr(), out_rows, out_heads,
        )  # fmt: skip
        on_all_threads(self._run, self._address, threads)
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
    """See `tree_attention`. Dtypes as `serves` has them; a cache of rows if `layout` is None.

    Rows of a tail, and those of a causal run of at most `SHORT_CHUNK`, get bit for bit what they
    get on the same path in any other tree or chain.
    """
    layer = AttentionLayer(
        kv_cache, query.shape[1], scale, dtype=query.dtype, softcap=softcap, window=window,
        sinks=sinks, k_scale=1.0 if k_scale is None else float(k_scale),
        v_scale=1.0 if v_scale is None else float(v_scale), layout=layout,
    )  # fmt: skip
    tables = block_table, query_start_loc, seq_lens, tail_lens, slots, ancestor_bits, depths
    layer(AttentionStep(*tables), query, out)
