# SPDX-License-Identifier: Apache-2.0
"""The gate: decides in the scheduler whether a step drafts, and how.

Three arms: plain decoding, n-gram drafts only, and trees. With t_a the time of a step of arm a and
y_a the tokens that each request gets from it, the gate takes the arm with the largest rate
y_a / t_a, and the simpler one at a tie. Both are measured in the scheduler, one for all ranks: t_a
from one step's output to the next, so it includes the host; y_a from the tokens of the replies.

t_a is kept by size class of the batch (1, 2, 3-4, 5-8, ... requests); a time that a class lacks is
scaled from the nearest class that has it. An arm without any time is explored at once. Another one
is explored when the time that two of its steps are expected to lose fits an allowance of 1/128 of
the time spent, so exploration costs less than 1%.

Imports no vLLM.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from enum import IntEnum
from functools import cache, partial

# An arm's time is the mean of its last 24 steps, outliers left out; of fewer than 8 the lower
# median: a burst of slow steps may have hit one, and by the minimum exploration seems free.
_SAMPLES, _FEW = 24, 8
# Exploration may cost this share of the time, in pairs of steps at least 16 steps apart. The second
# step of a pair is the first whose time belongs to its arm alone.
_ALLOWANCE, _EXPLORATION_STEPS, _INTERVAL = 1 / 128, 2, 16
# Once, an arm that seems to take 4 times as long as the one in use is explored whatever that is
# expected to cost: all of its steps may have been in one burst.
_IMPLAUSIBLE = 4
# Drafts, one for each request of a step, that trees must have had before their y is trusted.
_TRUSTED = 16
# A time above this multiple of the median is an outlier: the process may have been stopped.
_OUTLIER = 2.0


class Arm(IntEnum):
    """What a step ends with; the simpler arm has the smaller number."""

    PLAIN = 0
    NGRAM = 1
    TREE = 2


# Variances are relative to that of one request's tokens in a step. Process noise of y in a step:
_PROCESS_NOISE = 1 / 2048
# Variance of y before any step. Small for n-gram drafts: one lucky draft must not win.
_INITIAL_VARIANCE = {Arm.NGRAM: 1 / 8, Arm.TREE: 1e6}


class _MeanTokens:
    """Mean tokens per request and step of one arm, by a Kalman filter: the longer an arm has not
    been observed, the more its next step counts.
    """

    def __init__(self, variance: float) -> None:
        self.mean, self.drafts, self._variance, self._seen = 1.0, 0, variance, 0

    def add(self, tokens: float, num_reqs: int, step: int) -> None:
        """A step, number `step` of the gate's, gave each request `tokens` on average."""
        self.drafts += num_reqs
        self._variance += _PROCESS_NOISE * (step - self._seen)
        self._seen = step
        weight = self._variance / (self._variance + 1.0 / num_reqs)
        self.mean += weight * (tokens - self.mean)
        self._variance *= 1.0 - weight


class Gate:
    """Decides for one scheduler: `choose` an arm for every step, `observe` every step's output.

    Args:
        arms: the arms of this engine, ascending; a fixed budget has only one.
    """

    def __init__(self, arms: Sequence[Arm]) -> None:
        self.arms = tuple(arms)
        self.arm = self.arms[-1]
        self.reason = "no measurement yet"
        self._tokens = {arm: _MeanTokens(_INITIAL_VARIANCE.get(arm, 0.0)) for arm in self.arms}
        self._times = defaultdict[tuple[int, Arm], deque[float]](partial(deque, maxlen=_SAMPLES))
        # By size class: milliseconds of the arms that it has measured, and `costs`.
        self._ms = defaultdict[int, dict[Arm, float]](dict)
        self._costs: dict[int, dict[Arm, float]] = {}
        # Milliseconds that exploring each arm may cost: a cheap one must not use up another's.
        self._allowance = dict.fromkeys(self.arms, 0.0)
        self._share = _ALLOWANCE / max(len(self.arms) - 1, 1)
        self._since = 0  # steps since the last exploration
        self._exploration: tuple[Arm, int] = (Arm.PLAIN, 0)  # and its steps that are left
        # Arms that were explored, and the number of the step that took an arm last.
        self._explored, self._last_step = set[Arm](), dict.fromkeys(self.arms, 0)
        self._steps = 0

    # ---- measurements --------------------------------------------------------------------

    def observe(self, arm: Arm, num_reqs: int, tokens: int, ms: float) -> bool:
        """The output of a step without prompt tokens has arrived. Returns whether its time counts.

        Args:
            arm: what the step verified.
            num_reqs: its requests.
            tokens: tokens that they emitted.
            ms: time since the output of the step before; 0 if either step has a prompt or did not
                also end with `arm`.
        """
        if arm not in self.arms:  # the last steps of replies with a fixed budget
            return False
        if arm != Arm.PLAIN:
            self._tokens[arm].add(tokens / num_reqs, num_reqs, self._steps)
        if not 0.0 < ms < float("inf"):
            return False
        size = size_class(num_reqs)
        times = self._times[size, arm]
        if arm != self.arm and times and ms * _OUTLIER < self._ms[size][arm]:
            times.clear()  # the arm has become faster since it was in use
        times.append(ms)
        typical = self._ms[size][arm] = _typical(times)
        self._costs = {}
        for each in self.arms:
            self._allowance[each] += self._share * typical
        return ms <= _OUTLIER * typical

    def costs(self, num_reqs: int) -> dict[Arm, float]:
        """Milliseconds of a step with so many requests, of each arm for which they are known.

        An arm does all that a simpler one does, so it takes at least as long.
        """
        size = size_class(num_reqs)
        if size in self._costs:
            return self._costs[size]
        own = self._ms.get(size, {})
        if len(own) < len(self.arms) and self._ms.keys() - {size}:
            own = self._completed(size, own)
        costs, least = {}, math.inf
        for arm in reversed(self.arms):
            if arm in own:
                costs[arm] = least = own[arm] if own[arm] < least else least
        self._costs[size] = costs
        return costs

    def _completed(self, size: int, own: dict[Arm, float]) -> dict[Arm, float]:
        """`own`, completed by arms that only other size classes have measured.

        The nearest class gives the ratio of the arm's time to that of an arm which both have.
        """
        found = dict(own)
        for other in sorted(self._ms, key=lambda other: (abs(other - size), other)):
            there = self._ms[other]
            both = max(there.keys() & own.keys(), default=None)
            if both is None and own:
                continue
            scale = 1.0 if both is None else own[both] / there[both]
            for arm, ms in there.items():
                if arm not in found:
                    found[arm] = ms * scale
        return found

    def tokens(self, arm: Arm) -> float:
        """Tokens that a request gets from a step of `arm`; 1 from a plain one."""
        return self._tokens[arm].mean

    def gain(self, num_reqs: int) -> float | None:
        """Measured rate of the arm in use over that of plain decoding; None before both are."""
        costs = self.costs(num_reqs)
        if self.arm not in costs or Arm.PLAIN not in costs:
            return None
        return self.tokens(self.arm) / costs[self.arm] * costs[Arm.PLAIN]

    def ngram_tokens(self, num_reqs: int) -> float | None:
        """Tokens per request at which an n-gram only step breaks even with a step of trees.

        None where it is unknown.
        """
        costs = self.costs(num_reqs)
        if Arm.TREE not in costs or Arm.NGRAM not in costs:
            return None
        return self.tokens(Arm.TREE) / costs[Arm.TREE] * costs[Arm.NGRAM]

    # ---- the next step -------------------------------------------------------------------

    def choose(self, num_reqs: int) -> Arm:
        """The arm that the step ends with, for a next step with `num_reqs` requests."""
        self._steps += 1
        self._since += 1
        arm, left = self._exploration
        if left:
            self._exploration = arm, left - 1
        else:
            arm = self._chosen(self.costs(num_reqs))
        self._last_step[arm] = self._steps
        return arm

    def _chosen(self, costs: dict[Arm, float]) -> Arm:
        self.arm, self.reason, most = self.arms[-1], "not measured yet", 0.0
        if self.arm and self._tokens[self.arm].drafts < _TRUSTED:
            return self.arm
        for arm in self.arms:
            if arm in costs and (rate := self._tokens[arm].mean / costs[arm]) > most:
                # Ties go to the first one, the simplest arm.
                self.arm, self.reason, most = arm, "fastest", rate
        explored = self._next_exploration(costs)
        return self.arm if explored is None else explored

    def _next_exploration(self, costs: dict[Arm, float]) -> Arm | None:
        """Another arm, if it is time to explore one."""
        interval = _INTERVAL if len(costs) == len(self.arms) else _EXPLORATION_STEPS + 2
        if self._since < interval:
            return None
        others = sorted(set(self.arms) - {self.arm}, key=self._last_step.__getitem__)
        for arm in others:
            if arm not in costs:
                return self._explore(arm, _EXPLORATION_STEPS + 1)
        if self._since < _INTERVAL or self.arm not in costs:
            return None
        rate = self.tokens(self.arm) / costs[self.arm]
        for arm in others:
            lost = _EXPLORATION_STEPS * (costs[arm] - self.tokens(arm) / rate)
            free = arm not in self._explored and costs[arm] > _IMPLAUSIBLE * costs[self.arm]
            if free or lost <= self._allowance[arm]:
                self._explored.add(arm)
                self._allowance[arm] = max(self._allowance[arm] - max(lost, 0.0), 0.0)
                return self._explore(arm, _EXPLORATION_STEPS)
        return None

    def _explore(self, arm: Arm, steps: int) -> Arm:
        self._since, self._exploration, self.reason = -steps, (arm, steps - 1), "exploration"
        return arm


@cache
def size_class(num_reqs: int) -> int:
    """0 for one request, 1 for 2, 2 for 3 and 4, 3 for 5 to 8, and so on."""
    return ((num_reqs or 1) - 1).bit_length()


def _typical(times: Sequence[float]) -> float:
    """Their mean without outliers; of a few, the median."""
    ordered = sorted(times)
    count = len(ordered)
    if count < _FEW:
        return ordered[(count - 1) // 2]
    median = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
    while ordered[-1] > _OUTLIER * median:
        ordered.pop()
    return sum(ordered) / len(ordered)
