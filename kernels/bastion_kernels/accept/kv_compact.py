# SPDX-License-Identifier: Apache-2.0
"""Move the accepted rows of every KV cache to where plain decoding would have stored them.

With root row t0 = query_start_loc[r+1] - (cu[r+1] - cu[r]) and slots m_g of KV-cache group g,

    cache[m_g[t0 + i]] = cache[m_g[t0 + path[r, i]]]     for i >= 1 while path[r, i] >= 0

One launch moves all caches of a layout, of any group; a table in device memory has their addresses.
Layouts are compile-time constants. Nodes are numbered parents first, so path[i] >= i. A destination
can be the source of another entry, so a program loads all source rows of its columns before it
stores any. Entries with path[i] = i are in place and cause no traffic. Caches of any dtype are
moved as the widest integers that their layout allows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from bastion_kernels.attention.kv_layout import KVLayout
from bastion_kernels.checks import check, declared
from bastion_kernels.op import Op, cdiv, padded, public
from bastion_kernels.triton_or_none import tl, triton

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_TRITON_INTEGERS = {1: tl.uint8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
_UNITS = 256  # most integers of a row in one program
_TILE = 4096  # integers in one program: 32 per thread; more would spill


@triton.jit
def _second(first, second):
    """The operator of a scan that leaves its input as it is; see `_compact_kernel`."""
    return second


@triton.jit
def _row_offset(b_slot, PAGE: tl.constexpr, STRIDE_BLOCK: tl.constexpr, STRIDE_ROW: tl.constexpr):
    """Offset of the row of a uint32 slot; may exceed 32 bits, unlike the slot."""
    if STRIDE_BLOCK == PAGE * STRIDE_ROW:
        o_row = b_slot.to(tl.int64) * STRIDE_ROW
    else:
        o_row = (b_slot // PAGE).to(tl.int64) * STRIDE_BLOCK + (b_slot % PAGE) * STRIDE_ROW
    return o_row


# Slices of longer buffers: variants by alignment would be compiled while serving.
_SLICES = ["slot_mappings", "query_start_loc", "cu_num_logits", "path"]


@triton.jit(
    do_not_specialize=["stride_slot_mappings_g", "stride_path_r"],
    do_not_specialize_on_alignment=_SLICES,
)
def _compact_kernel(
    # [caches, 2] int64: address and group of each
    table,
    # [G, T] int64
    slot_mappings,
    # [R+1] int32 each
    query_start_loc,
    cu_num_logits,
    # [R, L + 1] int32
    path,
    stride_slot_mappings_g,
    stride_path_r,
    WIDTH: tl.constexpr,
    DEPTHS: tl.constexpr,
    # layout of the caches, in integers
    INTEGER: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PAGE: tl.constexpr,
    STRIDE_BLOCK: tl.constexpr,
    STRIDE_ROW: tl.constexpr,
    STRIDE_HEAD: tl.constexpr,
    HEAD_UNITS: tl.constexpr,
    ROW_UNITS: tl.constexpr,
    UNITS: tl.constexpr,
):
    """Move UNITS integers of all accepted rows of one request. Grid: (R, caches, unit blocks).

    ALIGNMENT is that of the caches' addresses, in bytes. A row consists of ROW_UNITS integers, in
    contiguous runs of HEAD_UNITS that lie STRIDE_HEAD apart.
    """
    i_r = tl.program_id(0)
    o_d = tl.arange(0, DEPTHS)
    end = tl.load(cu_num_logits + i_r + 1)
    tail = end - tl.load(cu_num_logits + i_r)
    root = tl.load(query_start_loc + i_r + 1) - tail
    p_path = path + i_r.to(tl.int64) * stride_path_r
    b_node = tl.load(p_path + o_d, mask=o_d < WIDTH, other=-1)
    # the path ends at the first entry outside the tail; later entries are stale
    stop = tl.min(tl.where((b_node >= 0) & (b_node < tail), DEPTHS, o_d), 0)
    m_d = (o_d < stop) & (b_node != o_d)
    if tl.max(m_d.to(tl.int32), 0) > 0:
        i_c = tl.program_id(1)
        p_entry = table + i_c * 2
        p_cache = tl.load(p_entry).to(tl.pointer_type(INTEGER))
        p_cache = tl.multiple_of(p_cache, ALIGNMENT)
        p_slots = slot_mappings + tl.load(p_entry + 1) * stride_slot_mappings_g + root
        b_source = tl.load(p_slots + b_node, mask=m_d, other=-1)
        b_target = tl.load(p_slots + o_d, mask=m_d, other=-1)
        m_d &= (b_source >= 0) & (b_target >= 0)
        # A slot fits 31 bits (checked). The scan leaves them as they are, but keeps the compiler
        # from rematerialising the loads: every thread would load all slots, some 500 instructions.
        b_move = tl.where(m_d, (b_source << 32) | b_target, -1)
        b_move = tl.associative_scan(b_move, 0, _second)
        m_d = b_move >= 0
        b_source, b_target = (b_move >> 32).to(tl.uint32), b_move.to(tl.uint32)
        i_u = tl.program_id(2)
        o_u = i_u * UNITS + tl.arange(0, UNITS)
        o_c = (o_u // HEAD_UNITS).to(tl.int64) * STRIDE_HEAD + o_u % HEAD_UNITS
        m_move = m_d[:, None] & (o_u < ROW_UNITS)[None, :]
        o_source = _row_offset(b_source, PAGE, STRIDE_BLOCK, STRIDE_ROW)
        o_target = _row_offset(b_target, PAGE, STRIDE_BLOCK, STRIDE_ROW)
        b_stored = tl.load(p_cache + o_source[:, None] + o_c[None, :], mask=m_move, other=0)
        # all threads must read before any thread writes
        tl.debug_barrier()
        tl.store(p_cache + o_target[:, None] + o_c[None, :], b_stored, mask=m_move)


class _Layout(NamedTuple):
    """Layout of a cache, in integers of `unit` bytes."""

    unit: int
    page: int
    stride_block: int
    stride_row: int
    stride_head: int
    head_units: int  # contiguous: of one head, or of all
    row_units: int

    @classmethod
    def of(cls, cache: Tensor) -> _Layout:
        size = cache.element_size()
        _, heads, page, columns = cache.shape
        lengths = [length * size for length in (*cache.stride()[:3], columns)]
        unit = math.gcd(8, cache.data_ptr(), *lengths)
        block, head, row, units = (length // unit for length in lengths)
        contiguous = heads * units if heads == 1 or head == units else units
        return cls(unit, page, block, row, head, contiguous, heads * units)


class KVCaches:
    """The KV caches of all layers.

    Args:
        caches: vLLM's logical views `[blocks, heads, block_size, C]` (`layer.kv_cache`), any
            strides with a contiguous last dimension, any dtype, all on one device.
        groups: KV-cache group of each cache, i.e. its row of `slot_mappings`.
        layouts: packing of each cache's blocks, on a CPU; None = in rows of C.

    A cache that appears twice (layers that share their KV) is moved once. Groups that alias one
    buffer are all moved, each by its own slots.

    Raises:
        ValueError: no cache, or a different layout.
    """

    def __init__(
        self,
        caches: Sequence[Tensor],
        groups: Sequence[int],
        layouts: Sequence[KVLayout | None] | None = None,
    ) -> None:
        layouts = [None] * len(caches) if layouts is None else layouts
        if not caches or not len(caches) == len(groups) == len(layouts):
            raise ValueError(
                f"KVCaches: {len(caches)} caches, {len(groups)} groups and {len(layouts)} layouts"
            )
        unique: dict[tuple[object, ...], tuple[Tensor, int, KVLayout | None]] = {}
        for cache, group, layout in zip(caches, groups, layouts, strict=True):
            check("KVCaches", ("a cache",), (cache,), (declared("[*, *, *, *]"),))
            if cache.shape[0] * cache.shape[2] >= 2**31:
                raise ValueError(f"KVCaches: {cache.shape[0]} blocks have too many slots")
            key = (group, cache.data_ptr(), cache.dtype, tuple(cache.shape), cache.stride())
            if layout is not None and (cache.is_cuda or layout.offsets.shape != cache.shape[2:]):
                raise ValueError("KVCaches: a layout that is not of this cache")
            integers = cache.view(_INTEGERS[cache.element_size()])
            unique.setdefault(key, (integers, group, layout))
        self.entries = [(cache, group) for cache, group, _ in unique.values()]
        self.layouts = [layout for _, _, layout in unique.values()]
        self.cpu_views: Any = None  # of `cpu.accept`
        tables: dict[_Layout, list[tuple[int, int]]] = {}
        for cache, group in self.entries:
            tables.setdefault(_Layout.of(cache), []).append((cache.data_ptr(), group))
        # [caches, 2] int64 address and group of those with a layout; the addresses' alignment
        self.tables = [
            (
                torch.tensor(table, dtype=torch.int64, device=caches[0].device),
                layout,
                math.gcd(16, *(address for address, _ in table)),
            )
            for layout, table in tables.items()
        ]


@dataclass(slots=True)
class CompactCaches(Op):
    """Move the accepted rows, in place. On a GPU, of caches of rows only."""

    caches: KVCaches
    slot_mappings: Annotated[
        Tensor, "[G, T] int64"
    ]  # cache slot of each row of the step, -1 = none
    query_start_loc: Annotated[Tensor, "[R + 1] int32"]  # first row of each request
    # First logits row of each request; its last `cu[r+1] - cu[r]` rows are its tail.
    cu_num_logits: Annotated[Tensor, "[R + 1] int32"]
    # Node numbers of the accepted path, path[r, 0] = 0, -1 past its end. Ignored for a request
    # without a tail.
    path: Annotated[Tensor, "[R, WIDTH] int32"]

    def triton(self) -> None:
        reqs, width = self.path.shape
        depths = padded(width)
        for table, layout, alignment in self.caches.tables:
            units = min(_UNITS, max(_TILE // depths, 32), padded(layout.row_units))
            self.launch(
                _compact_kernel,
                reqs,
                len(table),
                cdiv(layout.row_units, units),
                table=table,
                DEPTHS=depths,
                INTEGER=_TRITON_INTEGERS[layout.unit],
                ALIGNMENT=alignment,
                PAGE=layout.page,
                STRIDE_BLOCK=layout.stride_block,
                STRIDE_ROW=layout.stride_row,
                STRIDE_HEAD=layout.stride_head,
                HEAD_UNITS=layout.head_units,
                ROW_UNITS=layout.row_units,
                UNITS=units,
                num_warps=4,
            )


compact_caches = public(CompactCaches, cpu="bastion_kernels.cpu.accept")
