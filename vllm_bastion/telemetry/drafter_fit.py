# SPDX-License-Identifier: Apache-2.0
"""Warnings about a drafter that does not fit its target, or is used beyond its training.

A wrong drafter makes decoding slow, but not wrong, so without a warning it goes unnoticed.
"""

from __future__ import annotations

import time
from collections.abc import Callable

# Trees that are judged together, and fewer if almost none has ever had a token accepted: such a
# drafter is soon used in exploration steps only, and 1,000 trees would take hours.
TREES, NEAR_ZERO_TREES = 1000, 64
# Accepted tokens per tree that a wrong drafter gets by chance.
_BY_CHANCE = 0.02
# A drafter with fewer accepted tokens per tree does not fit; one that fits has several.
FEWEST_ACCEPTED = 0.1
# Seconds between two equal warnings.
_PAUSE = 3600.0


class DrafterFit:
    """Judges an engine's trees, TREES at a time, or NEAR_ZERO_TREES if almost none is accepted.

    Args:
        drafter: name or folder of the drafter, as the user gave it.
        target: likewise.
        positions: the longest context that the drafter was trained for; None if unknown.
        clock: seconds; for tests.
    """

    def __init__(
        self,
        drafter: str,
        target: str,
        positions: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._drafter, self._target, self.positions = drafter, target, positions
        self._clock = clock
        self._trees = self._accepted = 0
        self._all_trees = self._all_accepted = 0
        self._next_fit = self._next_context = -float("inf")

    def observe(self, trees: int, accepted: int) -> str | None:
        """Add verified trees and their accepted draft tokens. Returns a warning, or None."""
        self._trees, self._accepted = self._trees + trees, self._accepted + accepted
        self._all_trees, self._all_accepted = (
            self._all_trees + trees,
            self._all_accepted + accepted,
        )
        near_zero = self._all_accepted <= _BY_CHANCE * self._all_trees
        if self._trees < (NEAR_ZERO_TREES if near_zero else TREES):
            return None
        judged, tokens = self._trees, self._accepted
        self._trees = self._accepted = 0
        now = self._clock()
        if tokens >= FEWEST_ACCEPTED * judged or now < self._next_fit:
            return None
        self._next_fit = now + _PAUSE
        trained = f" ({self.positions} tokens)" if self.positions is not None else ""
        return (
            f'The drafter "{self._drafter}" does not fit the target "{self._target}": '
            f"{judged} trees had {tokens} draft tokens. Likely causes: it was trained for "
            "another target; the prompts use another chat template than its training data; the "
            f"context is longer than the drafter's positions{trained}; or the target is quantised "
            "and its hidden states differ. The output is right, but drafting gains nothing"
        )

    def observe_context(self, length: int) -> str | None:
        """A request with `length` tokens gets drafts. Returns a warning, or None."""
        if self.positions is None or length <= self.positions:
            return None
        now = self._clock()
        if now < self._next_context:
            return None
        self._next_context = now + _PAUSE
        return (
            f'A request has {length} tokens, but the drafter "{self._drafter}" was trained for at '
            f"most {self.positions}. Expect few accepted tokens beyond that; the output stays "
            "right. Use a drafter with more positions, or lower max_model_len"
        )
