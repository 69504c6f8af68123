# SPDX-License-Identifier: Apache-2.0
"""Move the accepted rows of every KV cache to where plain decoding would have put them.

With root row t0 = query_start_loc[r+1] - (cu[r+1] - cu[r]) and slots m_g of KV-cache group g,

    cache[m_g[t0 + i]] = cache[m_g[t0 + path[r, i]]]     for i >= 1 while path[r, i] >= 0

in one launch for all caches of one layout, in whatever groups: a table in device memory says where
each cache is. A model has one layout, or a few if its layers differ. Layouts are compile-time
constants: index arithmetic is cheap, and the compiler sees where 16 bytes can move at once. Nodes
are numbered parents first, so path[i] >= i. A destination can be the source of another entry, so a
program loads all source rows of its columns before it stores any. Entries with path[i] = i are
already in place and cost no memory traffic.

Caches of any dtype are moved as the widest integers that their layout allows. Bytes
moved: 2 * rows * heads * C * itemsize for each cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bastion_kernels.attention.kv_layout import KVLayout
from bastion_kernels.checks import check, on_gpu
from bastion_kernels.op import load
from bastion_kernels.triton_or_none import tl, triton

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_TRITON_INTEGERS = {1: tl.uint8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
_UNITS = 256  # largest number of integers of a row in one program
_TILE = 4096  # integers in one program: 32 of each thread, or registers run out


@triton.jit
def _second(first, second):
    """As a scan's operator this returns the input unchanged; `_compact_kernel` says why."""
    return second


@triton.jit
def _row_offset(slot, PAGE: tl.constexpr, STRIDE_BLOCK: tl.constexpr, STRIDE_ROW: tl.constexpr):
    """Where the row of a uint32 slot begins; unlike a slot, this need not fit 32 bits."""
    if STRIDE_BLOCK == PAGE * STRIDE_ROW:
        offset = slot.to(tl.int64) * STRIDE_ROW
    else:
        offset = (slot // PAGE).to(tl.int64) * STRIDE_BLOCK + (slot % PAGE) * STRIDE_ROW
    return offset


# Slices of longer buffers, at any address: a variant by alignment would be compiled while serving.
_SLICES = ["slots_ptr", "query_start_loc_ptr", "cu_num_logits_ptr", "path_ptr"]


@triton.jit(
    do_not_specialize=["stride_slots", "stride_path"], do_not_specialize_on_alignment=_SLICES
)
def _compact_kernel(
    # [caches, 2] int64: address and group of each
    table_ptr,
    # [G, T] int64
    slots_ptr,
    # [R+1] int32 each
    query_start_loc_ptr,
    cu_num_logits_ptr,
    # [R, D+1] int32
    path_ptr,
    stride_slots,
    stride_path,
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

    ALIGNMENT is that of the caches' addresses, in bytes. HEAD_UNITS are contiguous, and STRIDE_HEAD
    leads to the next as many; a row has ROW_UNITS in all.
    """
    request = tl.program_id(0)
    depth = tl.arange(0, DEPTHS)
    end = tl.load(cu_num_logits_ptr + request + 1)
    tail = end - tl.load(cu_num_logits_ptr + request)
    root = tl.load(query_start_loc_ptr + request + 1) - tail
    path_row_ptr = path_ptr + request.to(tl.int64) * stride_path
    node = tl.load(path_row_ptr + depth, mask=depth < WIDTH, other=-1)
    # an entry counts only while all before it do; entries beyond the tail are stale
    stop = tl.min(tl.where((node >= 0) & (node < tail), DEPTHS, depth), 0)
    live = (depth < stop) & (node != depth)
    if tl.max(live.to(tl.int32), 0) > 0:
        entry_ptr = table_ptr + tl.program_id(1) * 2
        cache_ptr = tl.load(entry_ptr).to(tl.pointer_type(INTEGER))
        cache_ptr = tl.multiple_of(cache_ptr, ALIGNMENT)
        group_slots_ptr = slots_ptr + tl.load(entry_ptr + 1) * stride_slots + root
        source = tl.load(group_slots_ptr + node, mask=live, other=-1)
        target = tl.load(group_slots_ptr + depth, mask=live, other=-1)
        live &= (source >= 0) & (target >= 0)
        # A slot fits in 31 bits (checked). The scan changes nothing, but the compiler cannot
        # recompute it: without it every thread loads all slots itself, some 500 instructions.
        move = tl.where(live, (source << 32) | target, -1)
        move = tl.associative_scan(move, 0, _second)
        live = move >= 0
        source, target = (move >> 32).to(tl.uint32), move.to(tl.uint32)
        unit = tl.program_id(2) * UNITS + tl.arange(0, UNITS)
        column = (unit // HEAD_UNITS).to(tl.int64) * STRIDE_HEAD + unit % HEAD_UNITS
        moved = live[:, None] & (unit < ROW_UNITS)[None, :]
        source_row = _row_offset(source, PAGE, STRIDE_BLOCK, STRIDE_ROW)
        target_row = _row_offset(target, PAGE, STRIDE_BLOCK, STRIDE_ROW)
        stored = tl.load(cache_ptr + source_row[:, None] + column[None, :], mask=moved, other=0)
        # every thread's reads come before any thread's writes
        tl.debug_barrier()
        tl.store(cache_ptr + target_row[:, None] + column[None, :], stored, mask=moved)


class _Layout(NamedTuple):
    """How a cache is laid out, in integers of `unit` bytes."""

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


class _Launch(NamedTuple):
    table: Tensor  # [caches, 2] int64: address and group
    layout: _Layout
    alignment: int  # of all addresses, bytes


class KVCompactor:
    """Compacts the KV caches of all layers after tree verification.

    Args:
        caches: vLLM's logical views `[blocks, heads, block_size, C]` (`layer.kv_cache`), any
            strides with a contiguous last dimension, any dtype, all on one device.
        groups: KV-cache group of each cache, i.e. its row of `slot_mappings`.
        layouts: how the blocks of each cache are packed, on a CPU; None = in rows of C.

    A cache that appears twice (layers that share their KV) is moved once; two groups that alias
    one buffer are both moved, each by its own slots.

    Raises:
        ValueError: no cache, or one that is not laid out like that.
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
                f"KVCompactor: {len(caches)} caches, {len(groups)} groups and {len(layouts)} "
                "layouts"
            )
        unique: dict[tuple[object, ...], tuple[Tensor, int, KVLayout | None]] = {}
        for cache, group, layout in zip(caches, groups, layouts, strict=True):
            check("KVCompactor", "a cache", cache, (None, None, None, None), cache.dtype)
            if cache.shape[0] * cache.shape[2] >= 2**31:
                raise ValueError(f"KVCompactor: {cache.shape[0]} blocks have too many slots")
            key = (group, cache.data_ptr(), cache.dtype, tuple(cache.shape), cache.stride())
            if layout is not None and (on_gpu(cache) or layout.offsets.shape != cache.shape[2:]):
                raise ValueError("KVCompactor: a layout that is not of this cache")
            integers = cache.view(_INTEGERS[cache.element_size()])
            unique.setdefault(key, (integers, group, layout))
        self.entries = [(cache, group) for cache, group, _ in unique.values()]
        self.layouts = [layout for _, _, layout in unique.values()]
        self._on_gpu = on_gpu(self.entries[0][0])
        self._launches = self._make_launches()
        if not self._on_gpu:
            plan = load("bastion_kernels.cpu.accept", "CompactPlan")
            self.compact_cpu = plan(self.entries, self.layouts).compact

    def _make_launches(self) -> list[_Launch]:
        tables: dict[_Layout, list[tuple[int, int]]] = {}
        for cache, group in self.entries:
            tables.setdefault(_Layout.of(cache), []).append((cache.data_ptr(), group))
        device = self.entries[0][0].device
        return [
            _Launch(
                torch.tensor(table, dtype=torch.int64, device=device),
                layout,
                math.gcd(16, *(address for address, _ in table)),
            )
            for layout, table in tables.items()
        ]

    def compact_reference(
        self, slot_mappings: Tensor, query_start_loc: Tensor, cu_num_logits: Tensor, path: Tensor
    ) -> None:
        """The definition, in plain PyTorch; see `compact`."""
        num_reqs, width = path.shape
        tail = (cu_num_logits[1 : num_reqs + 1] - cu_num_logits[:num_reqs]).long()[:, None]
        root = query_start_loc[1 : num_reqs + 1].long()[:, None] - tail
        depth = torch.arange(width, device=path.device)
        # an entry counts only while all before it do; entries beyond the tail are stale
        live = ((path >= 0) & (path < tail)).long().cumprod(1).bool() & (path != depth)
        source_rows = (root + path)[live]
        target_rows = (root + depth)[live]
        for (cache, group), layout in zip(self.entries, self.layouts, strict=True):
            source, target = slot_mappings[group][source_rows], slot_mappings[group][target_rows]
            keep = (source >= 0) & (target >= 0)
            source, target, page = source[keep], target[keep], cache.shape[2]
            if layout is None:
                cache[target // page, :, target % page] = cache[source // page, :, source % page]
                continue
            heads, offsets = torch.arange(cache.shape[1])[:, None], layout.offsets.long()
            blocks = cache.flatten(2)
            stored = blocks[(source // page)[:, None, None], heads, offsets[source % page][:, None]]
            blocks[(target // page)[:, None, None], heads, offsets[target % page][:, None]] = stored

    def compact_triton(
        self, slot_mappings: Tensor, query_start_loc: Tensor, cu_num_logits: Tensor, path: Tensor
    ) -> None:
        """The Triton kernel; see `compact`. Caches of rows only."""
        num_reqs, width = path.shape
        depths = triton.next_power_of_2(width)
        for table, layout, alignment in self._launches:
            units = min(_UNITS, max(_TILE // depths, 32), triton.next_power_of_2(layout.row_units))
            _compact_kernel[(num_reqs, len(table), triton.cdiv(layout.row_units, units))](
                table,
                slot_mappings,
                query_start_loc,
                cu_num_logits,
                path,
                slot_mappings.stride(0),
                path.stride(0),
                WIDTH=width,
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

    def compact(
        self, slot_mappings: Tensor, query_start_loc: Tensor, cu_num_logits: Tensor, path: Tensor
    ) -> None:
        """Move the accepted rows, in place.

        Args:
            slot_mappings: `[G, T]` int64, cache slot of every row of the step, -1 = none.
            query_start_loc: `[R+1]` int32, first row of each request.
            cu_num_logits: `[R+1]` int32, first logits row of each request; the last
                `cu[r+1] - cu[r]` rows of a request are its tail (root and nodes).
            path: `[R, D+1]` int32, node numbers of the accepted path, path[r, 0] = 0, -1 past
                its end. A request without a tail is left alone whatever its path says.
        """
        op, num_reqs = "KVCompactor.compact", path.shape[0]
        check(op, "slot_mappings", slot_mappings, (None, None), torch.int64)
        check(op, "query_start_loc", query_start_loc, (num_reqs + 1,), torch.int32)
        check(op, "cu_num_logits", cu_num_logits, (num_reqs + 1,), torch.int32)
        check(op, "path", path, (num_reqs, None), torch.int32)
        if num_reqs == 0:
            return
        run = self.compact_triton if self._on_gpu else self.compact_cpu
        run(slot_mappings, query_start_loc, cu_num_logits, path)
