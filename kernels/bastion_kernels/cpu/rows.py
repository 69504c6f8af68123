# SPDX-License-Identifier: Apache-2.0
"""The row layouts of `rows` on a CPU, equal to the references."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from bastion_kernels.cpu.cache import njit

__all__ = ["bind_slots_cpu", "bind_tails_cpu", "kept_rows_cpu"]

_NO_TREES = np.empty(0, np.int32)


@njit
def _bind(idx_mapping, cu_num_logits, slots, tail_lens):
    count = idx_mapping.shape[0]
    for row in range(slots.shape[0]):
        slot = np.int64(idx_mapping[row]) if row < count else -1
        slots[row] = slot
        if row < tail_lens.shape[0]:
            tail = 0
            if slot >= 0 and cu_num_logits.shape[0] > 0:
                tail = cu_num_logits[row + 1] - cu_num_logits[row]
            tail_lens[row] = tail if tail > 1 else 0


def bind_slots_cpu(
    idx_mapping: Tensor,
    num_sampled: Tensor,
    slots: Tensor,
    base_rows: Tensor,
    emitted: Tensor,
) -> None:
    """See `bind_slots`."""
    _bind(idx_mapping.numpy(), _NO_TREES, slots.numpy(), _NO_TREES)
    base_rows.fill_(max(idx_mapping.shape[0], 1))
    emitted.numpy()[idx_mapping.numpy()] = num_sampled.numpy()


def bind_tails_cpu(
    idx_mapping: Tensor,
    cu_num_logits: Tensor | None,
    slots: Tensor,
    tail_lens: Tensor,
) -> None:
    """See `bind_tails`."""
    tails = _NO_TREES if cu_num_logits is None else cu_num_logits.numpy()
    _bind(idx_mapping.numpy(), tails, slots.numpy(), tail_lens.numpy())


@njit
def _kept_rows(
    kept_start, before, query_start_loc, cu_num_logits, path, positions, num_sampled, num_rejected,
    source, kept_positions, kept_rejected,
):  # fmt: skip
    for r in range(num_sampled.shape[0]):
        start, end = kept_start[r], kept_start[r + 1]
        root = query_start_loc[r + 1] - (cu_num_logits[r + 1] - cu_num_logits[r])
        for row in range(start, end):
            depth = row - start - before[r]
            node = path[r, depth] if 0 <= depth < path.shape[1] else -1
            source[row] = root + (node if node >= 0 else min(depth, 0))
            kept_positions[row] = positions[root] + depth
        kept = end - start - before[r] - num_sampled[r]
        kept_rejected[r] = kept if num_sampled[r] > 0 else num_rejected[r]


def kept_rows_cpu(
    kept_start: Tensor,
    before: Tensor,
    query_start_loc: Tensor,
    cu_num_logits: Tensor,
    path: Tensor,
    positions: Tensor,
    num_sampled: Tensor,
    num_rejected: Tensor,
    source: Tensor,
    kept_positions: Tensor,
    kept_rejected: Tensor,
    max_rows: int,
) -> None:
    """One row after the other; see `kept_rows`."""
    _kept_rows(
        kept_start.numpy(), before.numpy(), query_start_loc.numpy(), cu_num_logits.numpy(),
        path.numpy(), positions.numpy(), num_sampled.numpy(), num_rejected.numpy(),
        source.numpy(), kept_positions.numpy(), kept_rejected.numpy(),
    )  # fmt: skip
