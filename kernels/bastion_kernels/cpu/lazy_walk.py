# SPDX-License-Identifier: Apache-2.0
"""The acceptance walk on a CPU: a token is drawn only where the walk comes by.

On a GPU all rows are drawn in one launch and then walked. A CPU pays for every row of a large
vocabulary, and the walk visits one row a depth, so here the drawing follows the walk. The noise of
a draw is keyed by (seed, position), not by what else is drawn: the tokens are the same.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor


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
    """`bastion_kernels.accept_path` with tokens drawn on demand, all requests a depth at a time.

    Args:
        draw: rows [A] int64 of the step's logits, ascending, at most one a request -> their tokens
            [A] int64.
        node_ids, parents, slots, cu_num_logits, out_path, out_tokens, num_sampled: as there, on the
            CPU.
    """
    out_path.fill_(-1)
    out_tokens.zero_()
    num_sampled.zero_()
    path, tokens, counts = out_path.numpy(), out_tokens.numpy(), num_sampled.numpy()
    fed, starts = node_ids.numpy(), cu_num_logits.numpy()
    above = parents.numpy()
    node = np.zeros(len(slots), dtype=np.int64)
    slot_of = slots.numpy()
    active = np.flatnonzero((slot_of >= 0) & (np.diff(starts) > 0))
    for depth in range(path.shape[1]):
        if not len(active):
            break
        drawn = draw(torch.from_numpy(starts[active] + node[active])).numpy()
        path[active, depth] = node[active]
        tokens[active, depth] = drawn
        counts[active] = depth + 1
        going = np.zeros(len(active), dtype=bool)
        for i, (r, token) in enumerate(zip(active.tolist(), drawn.tolist(), strict=True)):
            first, last = int(node[r]), int(starts[r + 1] - starts[r]) - 1
            # Columns of a node's children lie behind its own.
            here = above[slot_of[r], first:last] == first
            here &= fed[starts[r] + 1 + first : starts[r] + 1 + last] == token
            child = int(here.argmax()) if len(here) else 0
            if len(here) and here[child]:
                node[r], going[i] = first + child + 1, True
        active = active[going]
