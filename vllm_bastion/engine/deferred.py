# SPDX-License-Identifier: Apache-2.0
"""The drafter's context while nothing is drafted: rows are kept, and stored many at a time.

A drafter attends to keys and values that it computes from the target's hidden states. A step
without a draft only keeps the hidden states of its rows, of prompts and accepted paths where there
is room. They become keys and values when drafting resumes; when a request leaves, because its
blocks may then be cached or belong to another request; and after a limited number of steps, before
a sliding window frees a block. If all rows belong to a request that leaves, and nothing can reuse
its blocks, they are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

_MAX_STEPS = 64
_MAX_VIEWS = 1024
# With a shorter sliding window, a block may be freed before its rows are stored.
_MIN_WINDOW = 2 * _MAX_STEPS


class DeferredContext:
    """Rows of steps without a draft that the drafter has not stored yet.

    Args:
        hidden: the target's hidden states, tensors [M, H].
        positions: [M] int64.
        slots: [G, M] int64, slots in each of the drafter's KV cache groups.
        max_num_reqs: most rows of a plain step.
        store: computes and stores keys and values of the first `count` rows of these buffers.
    """

    def __init__(
        self,
        hidden: Sequence[torch.Tensor],
        positions: torch.Tensor,
        slots: torch.Tensor,
        max_num_reqs: int,
        store: Callable[[int], None],
    ) -> None:
        self._hidden, self._positions, self._slots = hidden, positions, slots
        self._max_rows, self._store = len(positions), store
        # With at most this many rows kept, a plain step always fits.
        self._full = self._max_rows - max_num_reqs
        self.num_rows = self._num_steps = 0
        self._requests: set[str] = set()  # owners of the rows
        # [begin, end) of rows -> views of these rows in every buffer; most steps reuse them.
        self._views: dict[tuple[int, int], list[torch.Tensor]] = {}

    def add(self, rows: Sequence[torch.Tensor], count: int, requests: Sequence[str]) -> None:
        """Keep the first `count` rows of a step; see `has_room`. Rejected ones have no slot.

        Args:
            rows: hidden states, tensors [count or more, H], then positions, then slots of each
                group; none: they are in the buffers already, from `num_rows` on.
            requests: ids of the step's requests.
        """
        begin, end = self.num_rows, self.num_rows + count
        if rows:
            into = self._views.get((begin, end))
            if into is None:
                if len(self._views) >= _MAX_VIEWS:
                    self._views.clear()
                buffers = (*self._hidden, self._positions, *self._slots)
                into = self._views[begin, end] = [buffer[begin:end] for buffer in buffers]
            torch._foreach_copy_(
                into, [row if row.shape[0] == count else row[:count] for row in rows]
            )
        self.num_rows = end
        self._num_steps += 1
        self._requests.update(requests)
        if self._num_steps == _MAX_STEPS or end > self._full:
            self.flush()

    def has_room(self, count: int) -> bool:
        """Whether `count` rows can be added. There is always room for one row of each request."""
        return self.num_rows + count <= self._max_rows

    def make_room(self, count: int) -> bool:
        """Whether `count` rows can be added, if need be after storing those that were kept."""
        if not self.has_room(count):
            self.flush()
        return self.has_room(count)

    def leave(self, request: str, needed: bool) -> None:
        """A request gives up its blocks. `needed`: whether their content may be used again."""
        if request not in self._requests:
            return
        if not needed and len(self._requests) == 1:
            self.num_rows = 0
        self.flush()

    def flush(self) -> None:
        """Store the rows that were kept."""
        count, self.num_rows, self._num_steps = self.num_rows, 0, 0
        self._requests.clear()
        if count:
            self._store(count)


def may_defer(spec: KVCacheSpec, several: bool = False) -> bool:
    """Whether a row may wait: whether the request keeps the row's block until it is stored.

    several: for several rows of a step, whose blocks a sliding window may free at once.
    """
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return all(may_defer(inner, several) for inner in spec.kv_cache_specs.values())
    if isinstance(spec, SlidingWindowSpec):
        return not several and bool(spec.sliding_window >= _MIN_WINDOW)
    return isinstance(spec, FullAttentionSpec)
