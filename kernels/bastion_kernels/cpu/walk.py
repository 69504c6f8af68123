# SPDX-License-Identifier: Apache-2.0
"""Verification of paths on a CPU, over tokens drawn in advance or on demand.

On a GPU the tokens of all rows are drawn in one launch before the verification. On a CPU every row
of a large vocabulary is expensive, and the verification visits only one row per depth, so
`accept_lazily` draws one depth of all requests at a time. The noise of a draw depends only on
(seed, position), so the tokens are the same.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from bastion_kernels.accept.walk import AcceptPath
from bastion_kernels.cpu.cache import native, njit


@njit
def _advance(drawn, active, node, fed, parents, slots, starts):
    """Move every active request to its first child with its token; -1 where there is none."""
    for i in range(active.shape[0]):
        r = active[i]
        above, rows = node[r], starts[r + 1] - starts[r]
        node[r] = -1
        # a child comes after its parent, so start there
        for column in range(above, min(rows - 1, parents.shape[1])):
            token = fed[starts[r] + 1 + column]
            if parents[slots[r], column] == above and token == drawn[i]:
                node[r] = column + 1
                break


@native
def _count(sources, slots, cu_num_logits, out_path, counts):
    counts[:] = 0
    for r in range(slots.shape[0]):
        slot = slots[r]
        if slot < 0:
            continue
        for column in range(min(cu_num_logits[r + 1] - cu_num_logits[r] - 1, sources.shape[1])):
            if sources[slot, column] > 0:
                counts[r, 0, sources[slot, column] - 1] += 1
        for depth in range(out_path.shape[1]):
            node = out_path[r, depth]
            if node > 0 and sources[slot, node - 1] > 0:
                counts[r, 1, sources[slot, node - 1] - 1] += 1


def accept_lazily(draw: Callable[[Tensor], Tensor], op: AcceptPath) -> None:
    """`accept_path` with tokens drawn on demand, one depth of all requests at a time.

    Args:
        draw: maps rows `[A]` int64 of the step's logits, ascending, at most one per request, to
            their tokens `[A]` int64, in place of `op.sampled`.
    """
    op.out_path.fill_(-1)
    op.out_tokens.zero_()
    op.num_sampled.zero_()
    path, tokens, counts = op.out_path.numpy(), op.out_tokens.numpy(), op.num_sampled.numpy()
    starts, slots = op.cu_num_logits.numpy(), op.slots.numpy()
    tree = op.node_ids.numpy(), op.parents.numpy(), slots, starts
    node = np.zeros(len(slots), dtype=np.int64)
    active = np.flatnonzero((slots >= 0) & (np.diff(starts) > 0))
    for depth in range(path.shape[1]):
        if not len(active):
            break
        drawn = draw(torch.from_numpy(starts[active] + node[active])).numpy()
        path[active, depth] = node[active]
        tokens[active, depth] = drawn
        counts[active] = depth + 1
        _advance(drawn, active, node, *tree)
        active = active[node[active] >= 0]
    if op.num_rejected is not None:
        torch.sub(op.cu_num_logits.diff(), op.num_sampled, out=op.num_rejected)
    if op.counts is not None:
        _count(op)


def accept_path(op: AcceptPath) -> None:
    """Verify with tokens that were drawn at every row."""
    accept_lazily(lambda rows: op.sampled[rows], op)
