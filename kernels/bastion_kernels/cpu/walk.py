# SPDX-License-Identifier: Apache-2.0
"""The acceptance walk on a CPU, over tokens drawn in advance or on demand.

On a GPU all rows are drawn in one launch before the walk. On a CPU every row of a large vocabulary
is expensive, and the walk visits only one row per depth, so `accept_lazily` draws one depth of all
requests at a time. The noise of a draw depends only on (seed, position), so the tokens are the
same.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from bastion_kernels.accept.walk import AcceptPath
from bastion_kernels.cpu.cache import njit


@njit
def _child(parents, fed, start, rows, node, token):
    """The first child of `node` that carries `token`, -1 if there is none.

    parents: [N] of the request's slot; its root is row `start` of `fed`, and it has `rows` rows.
    """
    # a child comes after its parent, so start there
    for column in range(node, min(rows - 1, parents.shape[0])):
        if parents[column] == node and fed[start + 1 + column] == token:
            return column + 1
    return -1


@njit
def _walk(sampled, fed, parents, slots, starts, out_path, out_tokens, num_sampled):
    out_path[:] = -1
    out_tokens[:] = 0
    for r in range(slots.shape[0]):
        slot, start, rows = slots[r], starts[r], starts[r + 1] - starts[r]
        count, node = 0, 0 if slot >= 0 and rows > 0 else -1
        while node >= 0 and count < out_path.shape[1]:
            token = sampled[start + node]
            out_path[r, count], out_tokens[r, count] = node, token
            count += 1
            node = _child(parents[slot], fed, start, rows, node, token)
        num_sampled[r] = count


@njit
def _count(sources, slots, starts, path, counts):
    counts[:] = 0
    for r in range(slots.shape[0]):
        slot = slots[r]
        if slot < 0:
            continue
        for column in range(min(starts[r + 1] - starts[r] - 1, sources.shape[1])):
            if sources[slot, column] > 0:
                counts[r, 0, sources[slot, column] - 1] += 1
        for depth in range(path.shape[1]):
            node = path[r, depth]
            if node > 0 and sources[slot, node - 1] > 0:
                counts[r, 1, sources[slot, node - 1] - 1] += 1


def count_walk(
    slots: Tensor,
    cu_num_logits: Tensor,
    out_path: Tensor,
    num_sampled: Tensor,
    num_rejected: Tensor | None,
    sources: Tensor | None,
    counts: Tensor | None,
) -> None:
    """Write what `accept_path` counts after a walk; the arguments are its own."""
    if num_rejected is not None:
        torch.sub(cu_num_logits.diff(), num_sampled, out=num_rejected)
    if counts is not None:
        assert sources is not None
        _count(
            sources.numpy(), slots.numpy(), cu_num_logits.numpy(), out_path.numpy(), counts.numpy()
        )


def accept_path(op: AcceptPath) -> None:
    """The walk over tokens drawn at every row."""
    _walk(
        op.sampled.numpy(), op.node_ids.numpy(), op.parents.numpy(), op.slots.numpy(),
        op.cu_num_logits.numpy(), op.out_path.numpy(), op.out_tokens.numpy(),
        op.num_sampled.numpy(),
    )  # fmt: skip
    count_walk(
        op.slots, op.cu_num_logits, op.out_path, op.num_sampled, op.num_rejected, op.sources,
        op.counts,
    )  # fmt: skip


@njit
def _advance(drawn, active, node, fed, parents, slots, starts):
    """Move every active request to the child that carries its token; -1 where there is none."""
    for i in range(active.shape[0]):
        r = active[i]
        rows = starts[r + 1] - starts[r]
        node[r] = _child(parents[slots[r]], fed, starts[r], rows, node[r], drawn[i])


def accept_lazily(
    draw: Callable[[Tensor], Tensor],
    node_ids: Tensor,
    parents: Tensor,
    slots: Tensor,
    cu_num_logits: Tensor,
    out_path: Tensor,
    out_tokens: Tensor,
    num_sampled: Tensor,
) -> None:
    """`bastion_kernels.accept_path` with tokens drawn on demand, one depth of all requests at a
    time.

    Args:
        draw: rows `[A]` int64 of the step's logits, ascending, at most one a request -> their
            tokens `[A]` int64.
        node_ids, parents, slots, cu_num_logits, out_path, out_tokens, num_sampled: as in
            `accept_path`, on the CPU.
    """
    out_path.fill_(-1)
    out_tokens.zero_()
    num_sampled.zero_()
    path, tokens, counts = out_path.numpy(), out_tokens.numpy(), num_sampled.numpy()
    tree = node_ids.numpy(), parents.numpy(), slots.numpy(), cu_num_logits.numpy()
    starts = tree[3]
    node = np.zeros(len(slots), dtype=np.int64)
    active = np.flatnonzero((tree[2] >= 0) & (np.diff(starts) > 0))
    for depth in range(path.shape[1]):
        if not len(active):
            break
        drawn = draw(torch.from_numpy(starts[active] + node[active])).numpy()
        path[active, depth] = node[active]
        tokens[active, depth] = drawn
        counts[active] = depth + 1
        _advance(drawn, active, node, *tree)
        active = active[node[active] >= 0]
