# SPDX-License-Identifier: Apache-2.0
"""Gathering rows and compacting KV caches on a CPU, equal to the references."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from bastion_kernels.accept.gather import GatherRows
from bastion_kernels.attention.kv_layout import KVLayout
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
def _compact(caches, groups, slot_mappings, moves):
    """Caches: equal views [blocks, heads, page, columns]."""
    for from_row, to_row in moves:
        for i, cache in enumerate(caches):
            source, target = slot_mappings[groups[i], from_row], slot_mappings[groups[i], to_row]
            if source >= 0 and target >= 0:
                from_block, from_token = divmod(source, cache.shape[2])
                to_block, to_token = divmod(target, cache.shape[2])
                for head in range(cache.shape[1]):
                    for column in range(cache.shape[3]):
                        cache[to_block, head, to_token, column] = cache[
                            from_block, head, from_token, column
                        ]


@njit
def _compact_packed(caches, groups, offsets, slot_mappings, moves):
    """Caches: equal views [blocks, heads, page * columns]; offsets: [page, columns]."""
    page, columns = offsets.shape
    for from_row, to_row in moves:
        for i, cache in enumerate(caches):
            source, target = slot_mappings[groups[i], from_row], slot_mappings[groups[i], to_row]
            if source >= 0 and target >= 0:
                from_block, from_token = divmod(source, page)
                to_block, to_token = divmod(target, page)
                for head in range(cache.shape[1]):
                    source_head, target_head = cache[from_block, head], cache[to_block, head]
                    for column in range(columns):
                        target_head[offsets[to_token, column]] = source_head[
                            offsets[from_token, column]
                        ]


class CompactPlan:
    """NumPy views of the caches, by dtype and layout: Numba iterates over equal types only.

    layouts: packing of each cache, None for rows.
    """

    def __init__(
        self, entries: Sequence[tuple[Tensor, int]], layouts: Sequence[KVLayout | None]
    ) -> None:
        kinds: dict[object, tuple[list[np.ndarray], list[int], KVLayout | None]] = {}
        for (cache, group), layout in zip(entries, layouts, strict=True):
            view = (cache if layout is None else cache.flatten(2)).numpy()
            if layout is not None and not np.shares_memory(view, cache.numpy()):
                raise ValueError("KVCompactor: the heads of a packed cache must be contiguous")
            key = view.dtype, view.flags.c_contiguous, layout
            caches, groups, _ = kinds.setdefault(key, ([], [], layout))
            caches.append(view)
            groups.append(group)
        self.kinds = [(tuple(c), np.array(g), layout) for c, g, layout in kinds.values()]

    def compact(
        self, slot_mappings: Tensor, query_start_loc: Tensor, cu_num_logits: Tensor, path: Tensor
    ) -> None:
        """Row by row; see `KVCompactor.compact`."""
        moves = _moves(query_start_loc.numpy(), cu_num_logits.numpy(), path.numpy())
        for caches, groups, layout in self.kinds:
            if layout is None:
                _compact(caches, groups, slot_mappings.numpy(), moves)
            else:
                offsets = layout.offsets.numpy()
                _compact_packed(caches, groups, offsets, slot_mappings.numpy(), moves)
