# SPDX-License-Identifier: Apache-2.0
"""How the placeholders of a step are shared out: pure arithmetic, without vLLM.

A step has a token budget. Each decoding request needs one token, its root; the rest is for draft
nodes and for prompts. Neither may starve the other, and no request may occupy placeholders that its
own trees do not use and another request's would.
"""

from __future__ import annotations

import numpy as np


def even_split(total: int, limits: np.ndarray) -> np.ndarray:
    """Share `total` out as evenly as `limits` allow.

    limits: [R] integers, the most of each. Returns [R] integers.
    """
    wanted = int(limits.sum())
    if total >= wanted:
        return limits.copy()
    shares, left = np.zeros_like(limits), total
    while left > 0:
        room = np.flatnonzero(shares < limits)
        step = max(1, left // len(room))
        grown = np.minimum(limits[room] - shares[room], step)
        # If less than one each is left, the first rows get it.
        over = np.cumsum(grown) - left
        grown = np.maximum(grown - np.maximum(over, 0), 0)
        shares[room] += grown
        left -= int(grown.sum())
    return shares


def share_placeholders(
    tokens: int, wanted: np.ndarray, limits: np.ndarray, prompt_tokens: int
) -> np.ndarray:
    """Placeholders of R requests that compete with prompts for a step's tokens.

    Args:
        tokens: tokens of the step that remain after a root for each decoding request.
        wanted: [R] placeholders that each request can use, see `next_wanted`.
        limits: [R] most placeholders of each request.
        prompt_tokens: prompt tokens that wait to be computed. They get the tokens that trees do not
            want, and half of `tokens` if both want more.

    Returns:
        [R] integers, shared out evenly. A request gets more than it wanted only of tokens that
        nothing else wants.
    """
    tokens = max(tokens, 0)
    first = np.minimum(wanted, limits)
    for_trees = tokens - min(prompt_tokens, max(tokens - int(first.sum()), (tokens + 1) // 2))
    shares = even_split(for_trees, first)
    left = for_trees - int(shares.sum())
    return shares + even_split(left, limits - shares) if left else shares


def next_wanted(verified: int, depth: int) -> int:
    """Placeholders that a request can use in the next step.

    Twice as many as its last tree used, or a chain's length more: a tree that used all of its
    placeholders can grow.

    Args:
        verified: nodes of its last tree that were verified.
        depth: drafted positions, the length of a chain.
    """
    return verified + max(verified, depth)
