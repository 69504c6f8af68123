# SPDX-License-Identifier: Apache-2.0
"""The engine core's side: adds up the records of steps, and sends sums to a front end.

A front end needs several microseconds per metric, so it gets a sum once a second and not a record
per step. With several front ends, each sum goes to one of them, as vLLM's statistics do.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from vllm_bastion.telemetry.drafter_fit import DrafterFit
from vllm_bastion.telemetry.record import MOST_PENDING, PERIOD, StepRecord, Totals, drafted

# Seconds over which the estimated gain is averaged, by exponential decay.
_GAIN_PERIOD = 60.0
# The key of a sum in `SchedulerStats.kv_connector_stats`, see `hooks.telemetry`.
KEY = "bastion"


class Collector:
    """Sums of one engine core.

    Args:
        fit: judges the trees.
        warn: called with a warning.
        clock: seconds; for tests.
    """

    def __init__(
        self,
        fit: DrafterFit,
        warn: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.fit = fit
        self._warn, self._clock = warn, clock
        # The longest context that the drafter was trained for.
        self.positions = math.inf if fit.positions is None else fit.positions
        self._pending: list[StepRecord] = []
        self._sums, self._whole = Totals(), Totals()
        self._next = -float("inf")
        # Decayed sums of the plain equivalent and of the steps' time, and when they were updated.
        self._plain_ms = self._step_ms = self._updated = 0.0

    def add(self, step: StepRecord) -> None:
        """Add one step."""
        self._pending.append(step)
        if len(self._pending) >= MOST_PENDING:
            self._add_pending()

    def _add_pending(self) -> None:
        steps, self._pending = self._pending, []
        self._sums.add(steps)
        trees, tokens = drafted(steps)
        if trees and (warning := self.fit.observe(trees, tokens)) is not None:
            self._warn(warning)

    def context(self, length: int) -> None:
        """A request with `length` tokens, more than `positions`, gets drafts."""
        if (warning := self.fit.observe_context(length)) is not None:
            self._warn(warning)

    def due(self, idle: bool) -> bool:
        """Whether it is time for the next sum.

        Args:
            idle: whether no request is left, so that the next step may be far off.
        """
        return idle or self._clock() >= self._next

    def take(self) -> dict[str, Any] | None:
        """The sum since the last call; None without a step."""
        self._add_pending()
        if not self._sums.steps:
            return None
        now = self._clock()
        self._next = now + PERIOD
        pending, self._sums = self._sums, Totals()
        self._whole.merge(pending)
        decay = math.exp((self._updated - now) / _GAIN_PERIOD)
        self._plain_ms = decay * self._plain_ms + pending.plain_ms
        self._step_ms = decay * self._step_ms + pending.step_ms
        self._updated = now
        if self._step_ms > 0:
            pending.now["gain"] = self._plain_ms / self._step_ms
        return pending.to_plain()

    def whole(self) -> Totals:
        """The sum of all steps so far."""
        self._add_pending()
        whole = Totals()
        whole.merge(self._whole)
        whole.merge(self._sums)
        return whole
