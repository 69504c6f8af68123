# SPDX-License-Identifier: Apache-2.0
"""Move the accepted rows of every KV cache to where plain decoding would have put them.

With root row t0 = query_start_loc[r+1] - (cu[r+1] - cu[r]) and slots m_g of KV-cache group g,

    cache[m_g[t0 + i]] = cache[m_g[t0 + path[r, i]]]     for i >= 1 while path[r, i] >= 0

for all caches of all groups in one launch: a table in device memory says where each cache is and
how it is laid out. Nodes are numbered parents first, so path[i] >= i; but a destination can be the
source of another entry, so a program holds all source rows of its columns before it writes one.
Entries with path[i] = i are where they belong already and cost no memory traffic.

Moving rows is independent of what they hold: caches of any dtype are moved as the widest integers
that their layout allows. Bytes moved: 2 * rows * heads * C * itemsize for each cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from bastion_kernels.checks import check, on_gpu

__all__ = ["KVCompactor"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_TRITON_INTEGERS = {1: tl.uint8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
_UNITS = 128  # largest number of integers of a row in one program
_FIELDS = 8  # int64 fields of a cache in the table


@triton.jit(do_not_specialize=["stride_slots", "stride_path"])
def _compact_kernel(
    # [caches, 8] int64: address, strides of block, head and row, block size, heads, integers of
    # a head, group
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
    UNITS: tl.constexpr,
    FIELDS: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """Move UNITS integers of all accepted rows of one request. Grid: (R, caches, unit blocks)."""
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
        entry_ptr = table_ptr + tl.program_id(1) * FIELDS
        cache_ptr = tl.load(entry_ptr).to(tl.pointer_type(INTEGER))
        stride_block = tl.load(entry_ptr + 1)
        stride_head = tl.load(entry_ptr + 2)
        stride_row = tl.load(entry_ptr + 3)
        page = tl.load(entry_ptr + 4).to(tl.int32)
        heads = tl.load(entry_ptr + 5).to(tl.int32)
        head_units = tl.load(entry_ptr + 6).to(tl.int32)
        group = tl.load(entry_ptr + 7)

        group_slots_ptr = slots_ptr + group * stride_slots + root
        source = tl.load(group_slots_ptr + node, mask=live, other=-1)
        target = tl.load(group_slots_ptr + depth, mask=live, other=-1)
        live &= (source >= 0) & (target >= 0)
        unit = tl.program_id(2) * UNITS + tl.arange(0, UNITS)
        column = (unit // head_units).to(tl.int64) * stride_head + unit % head_units
        moved = live[:, None] & (unit < heads * head_units)[None, :]
        # a slot fits 32 bits (checked), where division is cheap; an offset need not
        source, target = source.to(tl.int32), target.to(tl.int32)
        source_row = (source // page).to(tl.int64) * stride_block + source % page * stride_row
        target_row = (target // page).to(tl.int64) * stride_block + target % page * stride_row
        held = tl.load(cache_ptr + source_row[:, None] + column[None, :], mask=moved, other=0)
        # every thread's reads come before any thread's writes
        tl.debug_barrier()
        tl.store(cache_ptr + target_row[:, None] + column[None, :], held, mask=moved)


class KVCompactor:
    """Compacts the KV caches of all layers after tree verification.

    Args:
        caches: vLLM's logical views `[blocks, heads, block_size, C]` (`layer.kv_cache`), any
            strides with a contiguous last dimension, any dtype, all on one device.
        groups: KV-cache group of each cache, i.e. its row of `slot_mappings`.

    A cache that appears twice (layers that share their KV) is moved once; two groups that alias
    one buffer are both moved, each by its own slots.

    Raises:
        ValueError: no cache, or one that is not laid out like that.
    """

    def __init__(self, caches: Sequence[Tensor], groups: Sequence[int]) -> None:
        if not caches or len(caches) != len(groups):
            raise ValueError(f"KVCompactor: {len(caches)} caches and {len(groups)} groups")
        unique: dict[tuple[object, ...], tuple[Tensor, int]] = {}
        for cache, group in zip(caches, groups, strict=True):
            check("KVCompactor", "a cache", cache, (None, None, None, None), cache.dtype)
            if cache.shape[0] * cache.shape[2] >= 2**31:
                raise ValueError(f"KVCompactor: {cache.shape[0]} blocks have too many slots")
            key = (group, cache.data_ptr(), cache.dtype, tuple(cache.shape), cache.stride())
            unique.setdefault(key, (cache.view(_INTEGERS[cache.element_size()]), group))
        self.entries = list(unique.values())
        self._make_table()

    def _make_table(self) -> None:
        unit = 8
        for cache, _ in self.entries:
            size = cache.element_size()
            lengths = (*cache.stride()[:3], cache.shape[3])
            unit = math.gcd(unit, cache.data_ptr(), *(length * size for length in lengths))
        rows = []
        for cache, group in self.entries:
            _, heads, page, columns = cache.shape
            in_units = [x * cache.element_size() // unit for x in (*cache.stride()[:3], columns)]
            row = [cache.data_ptr(), *in_units[:3], page, heads, in_units[3], group]
            assert len(row) == _FIELDS
            rows.append(row)
        self._table = torch.tensor(rows, dtype=torch.int64, device=self.entries[0][0].device)
        self._integer = _TRITON_INTEGERS[unit]
        self._row_units = max(row[5] * row[6] for row in rows)

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
        for cache, group in self.entries:
            source, target = slot_mappings[group][source_rows], slot_mappings[group][target_rows]
            keep = (source >= 0) & (target >= 0)
            source, target, page = source[keep], target[keep], cache.shape[2]
            cache[target // page, :, target % page] = cache[source // page, :, source % page]

    def compact_triton(
        self, slot_mappings: Tensor, query_start_loc: Tensor, cu_num_logits: Tensor, path: Tensor
    ) -> None:
        """The Triton kernel; see `compact`."""
        num_reqs, width = path.shape
        units = min(_UNITS, triton.next_power_of_2(self._row_units))
        grid = (num_reqs, len(self.entries), triton.cdiv(self._row_units, units))
        _compact_kernel[grid](
            self._table,
            slot_mappings,
            query_start_loc,
            cu_num_logits,
            path,
            slot_mappings.stride(0),
            path.stride(0),
            WIDTH=width,
            DEPTHS=triton.next_power_of_2(width),
            UNITS=units,
            FIELDS=_FIELDS,
            INTEGER=self._integer,
            num_warps=8,
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
        run = self.compact_triton if on_gpu(path) else self.compact_reference
        run(slot_mappings, query_start_loc, cu_num_logits, path)
