# SPDX-License-Identifier: Apache-2.0
"""When to try the kind of step that does not seem to pay: probes that back off.

Plain steps yield no data on trees. So after B steps without drafts, two steps in a row draft. B
doubles from 16 to 512 each time they do not pay, and returns to 16 when they do. B is also 16 while
at least half of the batch's requests have had no tree.

With C and P the costs of a step with trees and of a plain one, a probe is expected to lose
2 C (1 - e^x), at most 2 (C - P). It is paid from an allowance that grows by 1/64 of the time and
starts with 4 P. So probes are expected to cost at most 1/64 of the time, however short replies and
however expensive trees are.

Steps with trees yield no data on the cost of plain steps. A few plain steps are taken at first if
their times could change the decision.
"""

from __future__ import annotations

_FIRST, _LAST = 16, 512
_OF_TREES, _OF_PLAIN = 2, 4
# The allowance's share of the time; its start value and usual maximum, in plain steps.
_SHARE, _MOST = 1 / 64, 4.0
# A probe is charged at least this fraction of its time: switching between kinds costs time, too.
_MIN_LOSS = 0.3
# Decisions after a probe until its results have arrived.
_PAUSE = 3


class Probes:
    """Counts steps without drafts, and says when to try them."""

    def __init__(self) -> None:
        self._wait, self._since = _FIRST, 0
        self._allowance = _MOST  # in plain steps
        # Decisions left in the current probe, and those until its result is known.
        self._left = self._pause = 0
        self._of_trees = False

    @property
    def active(self) -> bool:
        """Whether a probe is under way, or its result has not been used yet."""
        return self._left > 0 or self._pause > 0

    def reverses(
        self, drafts: bool, ratio: float, gain: float, *, new: float, in_doubt: bool, ends_in: int
    ) -> bool:
        """Whether the next step takes the kind that does not seem to pay.

        Args:
            drafts: whether trees seem to pay.
            ratio: C / P.
            gain: e^x, how much faster trees are expected to emit tokens.
            new: fraction of the batch's requests that have had no tree.
            in_doubt: whether plain steps could turn out to be faster than trees.
            ends_in: most steps until all requests have ended.
        """
        loss = _OF_TREES * ratio * max(1.0 - gain, _MIN_LOSS)
        earned = self._allowance + _SHARE * (ratio if drafts else 1.0)
        self._allowance = min(earned, max(_MOST, loss))
        self._since += not drafts
        if self._left:
            self._left -= 1
            return self._of_trees != drafts
        if self._pause:
            self._pause -= 1
            if not self._pause and self._of_trees:
                # `drafts` takes the probe's result into account.
                self._wait = _FIRST if drafts else min(2 * self._wait, _LAST)
            return False
        if drafts:
            self._wait, self._since = _FIRST, 0
            return in_doubt and ends_in > _OF_PLAIN and self._begin(of_trees=False)
        wait = _FIRST if new >= 0.5 else self._wait
        if self._since < wait or ends_in <= _OF_TREES or self._allowance < loss:
            return False
        self._allowance -= loss
        return self._begin(of_trees=True)

    def _begin(self, *, of_trees: bool) -> bool:
        self._left = (_OF_TREES if of_trees else _OF_PLAIN) - 1
        self._pause, self._of_trees, self._since = _PAUSE, of_trees, 0
        return True
