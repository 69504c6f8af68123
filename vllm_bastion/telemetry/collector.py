# SPDX-License-Identifier: Apache-2.0
"""The engine core's side: counts steps, judges the drafter, and sends the sums to a front end.

A front end needs several microseconds per metric, so it gets sums once a second and not a record
per step. With several front ends, each sum goes to one of them, as vLLM's statistics do.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable

from vllm_bastion.logger import init_logger
from vllm_bastion.telemetry.counts import Counts, StepRecord, add, to_plain

logger = init_logger(__name__)

# The key of the sums in `SchedulerStats.kv_connector_stats`, see `hooks.telemetry`.
KEY = "bastion"
# Among the sums, the gate's gain over plain decoding; absent while it is not measured.
GAIN = "gain"
# Seconds between two sums while requests run.
PERIOD = 1.0
# Trees that are judged together. With few accepted tokens the gate soon drafts for exploration
# only, where more trees would take hours.
TREES = 128
# A drafter with fewer accepted tokens per tree does not fit; one that fits has several.
_FEWEST_ACCEPTED = 0.1


class Collector:
    """Sums of one engine core.

    Args:
        clock: seconds; for tests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sums: Counts = Counter()
        self._sent: Counts = Counter()
        self._next = -math.inf
        # Of the drafter: trees since it was judged, and their accepted tokens.
        self._trees = self._accepted = 0
        self._has_warned = False

    def add(self, step: StepRecord) -> None:
        """Add one step."""
        add(self._sums, step)
        if not step.trees:
            return
        trees, tokens = by_drafter(step)
        self._trees += trees
        self._accepted += tokens
        if self._trees >= TREES:
            self._judge()

    def _judge(self) -> None:
        """Warn once of a drafter that does not fit: only the speed shows it, not the output."""
        trees, tokens, self._trees, self._accepted = self._trees, self._accepted, 0, 0
        if self._has_warned or tokens >= _FEWEST_ACCEPTED * trees:
            return
        self._has_warned = True
        logger.warning(
            "The drafter does not fit the target: %d trees had %d draft tokens accepted. Likely "
            "causes: it was trained for another target; the prompts use another chat template than "
            "its training data; the context is longer than the drafter's positions; or the target "
            "is quantised and its hidden states differ. The output is right, but drafting gains "
            "nothing",
            trees,
            tokens,
        )

    def due(self, idle: bool) -> bool:
        """Whether it is time for the next sums.

        Args:
            idle: whether no request is left, so that the next step may be far off.
        """
        return idle or self._clock() >= self._next

    def take(self, gain: float | None) -> dict[str, float] | None:
        """The sums since the last call; None without a step. gain: the gate's."""
        if not self._sums:
            return None
        self._next = self._clock() + PERIOD
        sums, self._sums = self._sums, Counter()
        self._sent.update(sums)
        return to_plain(sums) | ({} if gain is None else {GAIN: gain})

    def whole(self) -> Counts:
        """The sums of all steps since the last call."""
        sums, self._sums, self._sent = self._sent + self._sums, Counter(), Counter()
        return sums


def by_drafter(step: StepRecord) -> tuple[int, int]:
    """Trees of a step with nodes of the drafter, and how many of these were accepted.

    An n-gram draft carries no signal about the drafter.
    """
    if not step.sources:
        return step.trees, step.accepted
    from_drafter, _, from_both, accepted, _, accepted_of_both = step.sources
    if not (from_drafter or from_both):
        return 0, 0
    return step.trees, accepted + accepted_of_both
