# SPDX-License-Identifier: Apache-2.0
"""When to try the kind of step that does not seem to pay: probes that back off.

Plain steps yield no data on trees. So after B steps without drafts, two steps in a row draft. B
doubles from 16 to 512 each time they do not pay, and returns to 16 when they do. B is also 16 while
at least half of the batch's requests have had no tree.

With C and P the costs of a step with trees and of a plain one, a probe is expected to lose
2 C (1 - e^x), at most 2 (C - P). It is paid from an allowance that starts with P and grows by 1/128
of the time, or by 1.5 e^x / 128 if that is less: then trees are slower by more than costs that are
1.5 times too high explain. So probes of trees are expected to cost at most 1/128 of the time,
however short replies and however expensive trees are, and less where trees are hopeless.

Steps with trees or copies, or that looked for copies, yield no data on the cost of plain steps, and
P may drift away from it. So four plain steps are taken where their times could change the decision:
after 16 steps, and then each time that no plain step of such a batch was timed for 64 steps. The 64
double with each such probe, up to 1024.
"""

from __future__ import annotations

from typing import Literal

from vllm_bastion.policy.cost.latency import STALE

# Factor by which calibrated costs may be wrong.
DOUBT = 1.5
_FIRST, _LAST = 16, 512
_OF_TREES, _OF_PLAIN = 2, 4
_FIRST_PLAIN, _LAST_PLAIN = 16, 1024
# The allowance's largest share of the time; its start value and usual maximum, in plain steps.
_SHARE, _START, _MOST = 1 / 128, 1.0, 4.0
# A probe is charged at least this fraction of its time: switching between kinds costs time, too.
_MIN_LOSS = 0.3
# Decisions after a probe until its results have arrived.
_PAUSE = 3


Kind = Literal["trees", "plain steps"]


class Probes:
    """Counts steps without drafts, and says when to try which kind."""

    def __init__(self) -> None:
        self._wait, self._since = _FIRST, 0
        self._plain_wait, self._since_plain = STALE, STALE - _FIRST_PLAIN
        self._allowance = _START  # in plain steps
        # Decisions left in the current probe, and those until its result is known.
        self._left = self._pause = 0
        self._kind: Kind = "trees"

    @property
    def active(self) -> bool:
        """Whether a probe is under way, or its result has not been used yet."""
        return self._left > 0 or self._pause > 0

    def tries(
        self,
        drafts: bool,
        ratio: float,
        gain: float,
        *,
        new: float,
        plain_age: float,
        in_doubt: bool,
        ends_in: int,
    ) -> Kind | None:
        """The kind of the next step if it is a probe; None: the one that seems to pay.

        Args:
            drafts: whether trees seem to pay.
            ratio: C / P.
            gain: e^x, how much faster trees are expected to emit tokens.
            new: fraction of the batch's requests that have had no tree.
            plain_age: see `LatencyModel.plain_age`.
            in_doubt: whether plain steps could turn out to be faster than what seems to pay.
            ends_in: most steps until all requests have ended.
        """
        loss = _OF_TREES * ratio * max(1.0 - gain, _MIN_LOSS)
        earned = self._allowance + _SHARE * (ratio if drafts else min(DOUBT * gain, 1.0))
        self._allowance = min(earned, max(_MOST, loss))
        self._since += not drafts
        self._since_plain += 1
        if self._left:
            self._left -= 1
            return None if drafts and self._kind == "trees" else self._kind
        if self._pause:
            self._pause -= 1
            if not self._pause:
                # `drafts` takes the probe's result into account.
                if self._kind == "trees":
                    self._wait = _FIRST if drafts else min(2 * self._wait, _LAST)
                else:
                    self._plain_wait = min(2 * self._plain_wait, _LAST_PLAIN)
            return None
        stale = min(plain_age, self._since_plain) >= self._plain_wait
        if in_doubt and stale and ends_in > _OF_PLAIN:
            self._since_plain = 0
            return self._begin("plain steps", _OF_PLAIN)
        if drafts:
            self._wait, self._since = _FIRST, 0
            return None
        wait = _FIRST if new >= 0.5 else self._wait
        if self._since < wait or ends_in <= _OF_TREES or self._allowance < loss:
            return None
        self._allowance -= loss
        return self._begin("trees", _OF_TREES)

    def _begin(self, kind: Kind, steps: int) -> Kind:
        self._left, self._pause = steps - 1, _PAUSE
        self._kind, self._since = kind, 0
        return kind
