# SPDX-License-Identifier: Apache-2.0
"""The worker's side: one `StepRecord` per step, from numbers that the host already has."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from vllm_bastion.telemetry.record import PERIOD, StepRecord, StepTime

# Why a plain step has no drafts although the gate allowed them: a new or preempted request; no room
# for drafts in vLLM's schedule; or the step was scheduled before the gate decided.
NO_TREE = "no tree yet"
# Why a step has nodes although the gate refused a draft.
ONLY_COPIES = "copies alone"


class Recorder:
    """Records the steps of one worker. All methods but `finish` run on the runner's thread.

    Args:
        kind: "tree" or "chain", what steps with drafts verify.
        always: why there are drafts in an engine without a gate.
        latest: returns the values of gauges by name; called when the next sum is due.
        clock: seconds; for tests.
    """

    def __init__(
        self,
        kind: str,
        always: str,
        latest: Callable[[], dict[str, float]] = dict,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.kind = kind
        self._latest, self._clock = latest, clock
        self._next_latest = -math.inf
        # Two reasons each for the current and the next step: for drafts, and for a plain step.
        self._reason, self._plain_reason = self._next_reasons = always, NO_TREE
        # The decisions about the current and the next step: number of requests, and a plain step's
        # cost.
        self._decided = self._next = (0, math.inf)
        self._step = StepRecord()

    def decided(
        self, drafts: bool, reason: str, num_reqs: int, plain_ms: float, *, looks_up: bool = False
    ) -> None:
        """The gate decided about the next step.

        Args:
            drafts: whether it gets trees.
            reason: why, in a few words: a label of metrics.
            num_reqs: requests of the decision.
            plain_ms: cost of a plain step of these requests; infinite if it is unknown.
            looks_up: whether it may get trees of copies alone.
        """
        self._next = num_reqs, plain_ms
        # A decision to draft gives no reason for a plain step, and vice versa.
        last = self._next_reasons[0]
        of_trees = ONLY_COPIES if looks_up else last
        self._next_reasons = (reason, NO_TREE) if drafts else (of_trees, reason)

    def copied(self) -> None:
        """The next step gets trees of copies alone in place of a draft."""
        self._next_reasons = ONLY_COPIES, self._next_reasons[1]

    def ended(self, requests: int, nodes: int, rows: int, tree_ms: float) -> None:
        """The host's part of a step has ended. Called after the decision about the next step.

        Args:
            requests: requests that decode.
            nodes: nodes that the step verifies.
            rows: target rows, those of prompts included.
            tree_ms: cost of a step with trees and `rows` rows; used only if it has nodes.
        """
        step = self._step
        step.requests, step.rows = requests, rows
        if nodes:
            step.kind, step.reason = self.kind, self._reason
        elif requests:
            step.kind, step.reason = "plain", self._plain_reason
        self._reason, self._plain_reason = self._next_reasons
        (decided_for, plain_ms), self._decided = self._decided, self._next
        # A step with prompts has no plain counterpart of known cost.
        known = requests == decided_for and math.isfinite(plain_ms)
        if known and requests and rows == requests + nodes:
            # `finish` scales `plain_ms` to the tokens that the step emitted.
            step.plain_ms, step.step_ms = plain_ms, tree_ms if nodes else plain_ms

    def yielded(self, promised: float, accepted: float) -> None:
        """Expected and accepted draft tokens of an earlier step's trees are known."""
        self._step.promised += promised
        self._step.yielded += accepted

    def timed(self, verified: bool, rows: int, predicted_ms: float, measured_ms: float) -> None:
        """A whole earlier step was timed."""
        if math.isfinite(predicted_ms):
            kind, step = self.kind if verified else "plain", self._step
            step.times = (*step.times, StepTime(kind, rows, predicted_ms, measured_ms))

    def take(self) -> StepRecord:
        """The record of the step that ended last, to be given to `finish`."""
        step, self._step = self._step, StepRecord()
        now = self._clock()
        if now >= self._next_latest:
            self._next_latest = now + PERIOD
            step.now = self._latest()
        return step

    @staticmethod
    def finish(
        step: StepRecord, nodes: list[int], accepted: list[int], sources: Sequence[int] = ()
    ) -> None:
        """Complete a record with what its output shows. Runs on the output's thread.

        Args:
            nodes: [T] nodes verified of each request that verified any.
            accepted: [T] draft tokens accepted of these.
            sources: see `StepRecord`.
        """
        step.nodes, step.accepted, step.sources = nodes, accepted, sources
        if nodes:
            step.plain_ms *= 1.0 + sum(accepted) / step.requests
