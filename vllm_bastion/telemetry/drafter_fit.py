# SPDX-License-Identifier: Apache-2.0
"""Warnings about a drafter that does not fit its target, or is used beyond its training.

A wrong drafter makes decoding slow, but not wrong, so without a warning it goes unnoticed.
"""

from __future__ import annotations

import time
from collections.abc import Callable

# Trees that are judged together: the gate soon uses a drafter without accepted tokens for
# exploration only, where more would take hours.
TREES = 128
# A drafter with fewer accepted tokens per tree does not fit; one that fits has several.
FEWEST_ACCEPTED = 0.1
# Seconds between two equal warnings.
_PAUSE = 3600.0


class DrafterFit:
    """Judges an engine's trees, TREES at a time.

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
        self._next: dict[str, float] = {}

    def _paused(self, kind: str) -> bool:
        """Whether a warning was given lately; if not, one is given now."""
        now = self._clock()
        if now < self._next.get(kind, now):
            return True
        self._next[kind] = now + _PAUSE
        return False

    def observe(self, trees: int, accepted: int) -> str | None:
        """Add verified trees and their accepted draft tokens. Returns a warning, or None."""
        judged = self._trees = self._trees + trees
        tokens = self._accepted = self._accepted + accepted
        if judged < TREES:
            return None
        self._trees = self._accepted = 0
        if tokens >= FEWEST_ACCEPTED * judged or self._paused("fit"):
            return None
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
        if self.positions is None or length <= self.positions or self._paused("context"):
            return None
        return (
            f'A request has {length} tokens, but the drafter "{self._drafter}" was trained for at '
            f"most {self.positions}. Expect few accepted tokens beyond that; the output stays "
            "right. Use a drafter with more positions, or lower max_model_len"
        )
