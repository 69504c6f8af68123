# SPDX-License-Identifier: Apache-2.0
"""Gathering rows and compacting KV caches on a CPU, equal to the references."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from bastion_kernels.accept.gather import GatherRows
from bastion_kernels.accept.kv_compact import CompactCaches, KVCaches
from bastion_kernels.cpu.cache import njit


def gather_rows(op: GatherRows) -> None:
    count = op.rows.shape[0]
    if count == 0:
        return
    whole = bool(op.rows.min() >= 0)
    live = None if whole else op.rows >= 0
    for source, out in zip(op.sources, op.outs, strict=True):
        if whole:
            torch.index_select(source, 0, op.rows, out=out[:count])
        else:
            out[:count][live] = source[op.rows[live]]


@njit
def _moves(query_start_loc, cu_num_logits, path):
    """[n, 2] int64: rows of the step to copy from and to, in this order.

    Nodes are numbered parents first, so no row is overwritten before it is copied.
    """
    moves = np.empty((path.size, 2), np.int64)
    count = 0
    for r in range(path.shape[0]):
        tail = cu_num_logits[r + 1] - cu_num_logits[r]
        root = query_start_loc[r + 1] - tail
        for depth in range(path.shape[1]):
            node = path[r, depth]
            if node < 0 or node >= tail:
                break
            if node != depth:
                moves[count, 0], moves[count, 1] = root + node, root + depth
                count += 1
    return moves[:count]


@njit
def _compact(caches, groups, stride_block, stride_head, heads, offsets, slot_mappings, moves):
    """Caches: their memory, of equal strides; offsets: [page, columns] within a block's head."""
    page, columns = offsets.shape
    for from_row, to_row in moves:
        for i, cache in enumerate(caches):
            source, target = slot_mappings[groups[i], from_row], slot_mappings[groups[i], to_row]
            if source >= 0 and target >= 0:
                from_block, from_token = divmod(source, page)
                to_block, to_token = divmod(target, page)
                for head in range(heads):
                    given = cache[from_block * stride_block + head * stride_head :]
                    out = cache[to_block * stride_block + head * stride_head :]
                    for column in range(columns):
                        out[offsets[to_token, column]] = given[offsets[from_token, column]]


def _views(caches: KVCaches) -> list[tuple[Any, ...]]:
    """NumPy views of the caches' memory, by dtype and layout: Numba iterates over equal types only.

    Each is the first arguments of `_compact`.
    """
    kinds: dict[object, tuple[list[np.ndarray], list[int], tuple[int, ...], np.ndarray]] = {}
    for (cache, group), layout in zip(caches.entries, caches.layouts, strict=True):
        (_, heads, page, columns), strides = cache.shape, cache.stride()
        size = 1 + sum((n - 1) * s for n, s in zip(cache.shape, strides, strict=True))
        if layout is None:
            offsets = torch.arange(page)[:, None] * strides[2] + torch.arange(columns)
        else:
            offsets = layout.offsets.long()
        key = cache.dtype, strides, heads, page, columns, layout
        sizes = (*strides[:2], heads)
        memory, groups, *_ = kinds.setdefault(key, ([], [], sizes, offsets.numpy()))
        memory.append(cache.as_strided((size,), (1,)).numpy())
        groups.append(group)
    return [(tuple(c), np.array(g), *sizes, o) for c, g, sizes, o in kinds.values()]


def compact_caches(op: CompactCaches) -> None:
    """Row by row."""
    if op.caches.cpu_views is None:
        op.caches.cpu_views = _views(op.caches)
    moves = _moves(op.query_start_loc.numpy(), op.cu_num_logits.numpy(), op.path.numpy())
    for views in op.caches.cpu_views:
        _compact(*views, op.slot_mappings.numpy(), moves)
