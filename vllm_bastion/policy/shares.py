# SPDX-License-Identifier: Apache-2.0
"""Who gets the placeholders of a step: pure arithmetic, without vLLM.

A step has room for a number of tokens. Every decoding request needs one of them, its root; what is
left is for draft nodes and for prompts. Neither is to keep the other waiting, and no request is to
hold placeholders that its trees do not use while another's would.
"""

from __future__ import annotations

import numpy as np


def even_split(total: int, limits: np.ndarray) -> np.ndarray:
    """Share `total` out over rows of at most `limits`, as evenly as they allow."""
    wanted = int(limits.sum())
    if total >= wanted:
        return limits.copy()
    shares, left = np.zeros_like(limits), total
    while left > 0:
        room = np.flatnonzero(shares < limits)
        step = max(1, left // len(room))
        grown = np.minimum(limits[room] - shares[room], step)
        # The last round hands out single nodes to the first rows.
        over = np.cumsum(grown) - left
        grown = np.maximum(grown - np.maximum(over, 0), 0)
        shares[room] += grown
        left -= int(grown.sum())
    return shares


def share_placeholders(
    tokens: int, wanted: np.ndarray, limits: np.ndarray, prompt_tokens: int
) -> np.ndarray:
    """Placeholders of R requests, given what prompts could use as well.

    Args:
        tokens: what the step has left once every decoding request has its root.
        wanted: [R] placeholders that each request has a use for, see `next_wanted`.
        limits: [R] most that each may have.
        prompt_tokens: prompt tokens that wait to be computed. They get what trees do not want, and
            half of what is left where both want more.

    Returns:
        [R], as large as can be shared evenly. Beyond `wanted` only from what nobody else wants.
    """
    tokens = max(tokens, 0)
    first = np.minimum(wanted, limits)
    for_trees = tokens - min(prompt_tokens, max(tokens - int(first.sum()), (tokens + 1) // 2))
    shares = even_split(for_trees, first)
    left = for_trees - int(shares.sum())
    return shares + even_split(left, limits - shares) if left else shares


def next_wanted(verified: int, depth: int) -> int:
    """Placeholders a request has a use for, by the nodes of its last tree that were verified.

    Twice as many, or a chain's length more: a tree that used up what it had grows on.
    """
    return verified + max(verified, depth)
