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

    def take(self, gain: float | None) -> dict[str, Any] | None:
        """The sum since the last call; None without a step. gain: the gate's."""
        self._add_pending()
        if not self._sums.steps:
            return None
        self._next = self._clock() + PERIOD
        pending, self._sums = self._sums, Totals()
        pending.gain = gain
        self._whole.merge(pending)
        return pending.to_plain()

    def whole(self) -> Totals:
        """The sum of all steps so far."""
        self._add_pending()
        whole = Totals()
        whole.merge(self._whole)
        whole.merge(self._sums)
        return whole
