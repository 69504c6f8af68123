# SPDX-License-Identifier: Apache-2.0
"""Move the accepted rows of every KV cache to where plain decoding would have put them.

With root row t0 = query_start_loc[r+1] - (cu[r+1] - cu[r]) and slots m_g of KV-cache group g,

    cache[m_g[t0 + i]] = cache[m_g[t0 + path[r, i]]]     for i >= 1 while path[r, i] >= 0

for all caches at once. Nodes are numbered parents first, so path[i] >= i; but a destination can be
the source of a later entry, hence all sources are read before any destination is written. Moving
rows is independent of what they hold, so quantised caches are moved as bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["KVCompactor"]

# dtype of the same width, for which indexing is implemented on every device
_BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class KVCompactor:
    """Compacts the KV caches of all layers after tree verification.

    Args:
        caches: vLLM's logical views `[blocks, heads, block_size, C]` (`layer.kv_cache`), any
            strides with a contiguous last dimension, any dtype.
        groups: KV-cache group of each cache, i.e. its row of `slot_mappings`.

    A cache that appears twice (layers that share their KV) is moved once; two groups that alias
    one buffer are both moved, each by its own slots.
    """

    def __init__(self, caches: Sequence[Tensor], groups: Sequence[int]) -> None:
        if len(caches) != len(groups):
            raise ValueError(f"KVCompactor: {len(caches)} caches but {len(groups)} groups")
        unique: dict[tuple[object, ...], tuple[Tensor, int]] = {}
        for cache, group in zip(caches, groups, strict=True):
            if cache.dim() != 4 or cache.stride(-1) != 1:
                raise ValueError(
                    "KVCompactor: a cache must be [blocks, heads, block_size, C] with a contiguous "
                    f"last dimension, got shape {tuple(cache.shape)}, strides {cache.stride()}"
                )
            key = (group, cache.data_ptr(), cache.dtype, tuple(cache.shape), cache.stride())
            unique.setdefault(key, (cache.view(_BYTES[cache.element_size()]), group))
        self.entries = list(unique.values())

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
            source, target, size = source[keep], target[keep], cache.shape[2]
            cache[target // size, :, target % size] = cache[source // size, :, source % size]

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
        self.compact_reference(slot_mappings, query_start_loc, cu_num_logits, path)
