# SPDX-License-Identifier: Apache-2.0
"""The engine core's side: adds up the records of steps, and hands on sums now and then.

A front end needs several microseconds per metric, so it gets a sum a few times a second and not a
record per step. With several front ends, each sum goes to one of them, as vLLM's statistics do.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from vllm_bastion.telemetry.drafter_fit import DrafterFit
from vllm_bastion.telemetry.record import StepRecord, Totals

# Seconds between two sums while requests run.
PERIOD = 0.25
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
        self._pending = Totals()
        self._next = -float("inf")
        # Decayed sums of the plain equivalent and of the steps' time, and when they were updated.
        self._plain_ms = self._step_ms = self._updated = 0.0

    def add(self, step: StepRecord) -> None:
        """Add one step."""
        self._pending.add(step)
        if step.accepted and (warning := self.fit.observe(step.accepted)) is not None:
            self._warn(warning)

    def context(self, length: int) -> None:
        """A request with `length` tokens gets drafts."""
        if (warning := self.fit.observe_context(length)) is not None:
            self._warn(warning)

    def take(self, idle: bool) -> dict[str, Any] | None:
        """The sum since the last call that returned one, if it is time for the next.

        Args:
            idle: whether no request is left, so that no further step may come for long.
        """
        now = self._clock()
        if not self._pending.steps or (now < self._next and not idle):
            return None
        self._next = now + PERIOD
        pending, self._pending = self._pending, Totals()
        decay = math.exp((self._updated - now) / _GAIN_PERIOD)
        self._plain_ms = decay * self._plain_ms + pending.plain_ms
        self._step_ms = decay * self._step_ms + pending.step_ms
        self._updated = now
        if self._step_ms > 0:
            pending.now["gain"] = self._plain_ms / self._step_ms
        return pending.to_plain()
