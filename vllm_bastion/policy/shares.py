# SPDX-License-Identifier: Apache-2.0
"""How the placeholders of a step are shared out: pure arithmetic, without vLLM.

A step has a token limit. Each decoding request needs one token, its root. Prompts come next, and
draft nodes get the rest. While prompts fill every step, a step takes C(limit) whatever its rows
are, so each row costs C(limit) / limit. A node takes one row, and saves a later step's root with
its path score as probability: it is worth at most that row. So prompt tokens come first.
Unused placeholders go to requests that can use them.
"""

from __future__ import annotations

import numpy as np


def even_split(total: int, limits: np.ndarray) -> np.ndarray:
    """Share `total` out as evenly as `limits` allow.

    limits: [R] integers, the most of each. Returns [R] integers.
    """
    total, count = max(total, 0), len(limits)
    if total >= limits.sum():
        return limits.copy()
    level, rest = divmod(total, count)
    if level < limits.min():  # the usual case: no limit is reached
        shares = np.full(count, level, dtype=limits.dtype)
        shares[:rest] += 1
        return shares
    ascending = np.sort(limits)
    # If each limit were the common level: the requests that reach it, and what the others get.
    above = np.arange(count, 0, -1)
    below = np.cumsum(ascending) - ascending
    i = int(np.argmax(below + ascending * above > total))
    level, rest = divmod(total - int(below[i]), int(above[i]))
    shares = np.minimum(limits, level)
    # If less than one each is left, the first rows get it.
    shares[np.flatnonzero(limits > level)[:rest]] += 1
    return shares


def share_placeholders(
    tokens: int, wanted: np.ndarray, limits: np.ndarray, prompt_tokens: int
) -> np.ndarray:
    """Placeholders of R requests that compete with prompts for a step's tokens.

    Args:
        tokens: tokens of the step that remain after a root for each decoding request.
        wanted: [R] placeholders that each request can use, see `next_wanted`.
        limits: [R] most placeholders of each request.
        prompt_tokens: prompt tokens that the step could compute. They come first.

    Returns:
        [R] integers, shared out evenly. A request gets more than it wanted only from tokens that
        are left over.
    """
    for_trees = max(tokens - prompt_tokens, 0)
    if for_trees >= limits.sum():
        return limits.copy()
    first = np.minimum(wanted, limits)
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
