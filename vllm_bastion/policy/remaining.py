# SPDX-License-Identifier: Apache-2.0
"""How many tokens requests may still emit: a draft beyond the end of a reply is of no use."""

from __future__ import annotations

import numpy as np

NO_LIMIT = 1 << 30


class RemainingTokens:
    """The most tokens that each request may still emit, by request slot.

    A step whose result the host has not read yet counts as one token.

    Args:
        num_slots: S.
    """

    def __init__(self, num_slots: int) -> None:
        self._remaining = np.full(num_slots, NO_LIMIT, dtype=np.int64)

    def restart(self, slot: int, tokens: int) -> None:
        """A new request takes the slot, and may emit `tokens` tokens; 0 or less: no limit."""
        self._remaining[slot] = tokens if tokens > 0 else NO_LIMIT

    def emit(self, slots: np.ndarray, tokens: np.ndarray | int = 1) -> None:
        """The requests in `slots`, [R], have emitted `tokens`, [R], more."""
        self._remaining[slots] -= tokens

    def after(self, slots: np.ndarray, tokens: np.ndarray | int = 1) -> np.ndarray:
        """[R] int64, what the requests in `slots`, [R], may emit after `tokens` more."""
        remaining: np.ndarray = self._remaining[slots] - tokens
        return remaining
