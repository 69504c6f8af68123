# SPDX-License-Identifier: Apache-2.0
"""The warning about a drafter that does not fit its target.

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
# Seconds between two warnings.
_PAUSE = 3600.0


class DrafterFit:
    """Judges an engine's trees, TREES at a time.

    Args:
        drafter, target: names or folders, as the user gave them.
        clock: seconds; for tests.
    """

    def __init__(
        self, drafter: str, target: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._drafter, self._target, self._clock = drafter, target, clock
        self._trees = self._accepted = 0
        self._next = -float("inf")

    def observe(self, trees: int, accepted: int) -> str | None:
        """Add verified trees and their accepted draft tokens. Returns a warning, or None."""
        judged = self._trees = self._trees + trees
        tokens = self._accepted = self._accepted + accepted
        if judged < TREES:
            return None
        self._trees = self._accepted = 0
        if tokens >= FEWEST_ACCEPTED * judged or self._clock() < self._next:
            return None
        self._next = self._clock() + _PAUSE
        return (
            f'The drafter "{self._drafter}" does not fit the target "{self._target}": '
            f"{judged} trees had {tokens} draft tokens. Likely causes: it was trained for "
            "another target; the prompts use another chat template than its training data; the "
            "context is longer than the drafter's positions; or the target is quantised and its "
            "hidden states differ. The output is right, but drafting gains nothing"
        )
