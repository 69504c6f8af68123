# SPDX-License-Identifier: Apache-2.0
"""What the scheduler remembers between steps."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from secrets import token_bytes
from typing import Any

from vllm_bastion.scheduler.gate import Arm, Gate, size_class
from vllm_bastion.scheduler.step_line import StepLine
from vllm_bastion.telemetry.collector import Collector


@dataclass(slots=True)
class Choice:
    """What a step ends with."""

    arm: Arm = Arm.PLAIN
    reason: str = "not measured yet"
    """Why: a label of metrics."""
    num_drafts: int = 0
    """K, the draft slots of each request in the step after it."""
    prompts_wait: bool = False
    """Whether nothing is drafted because prompts fill the next step."""


@dataclass
class LastStep:
    """The step whose output arrived last: the next one's time is counted from it."""

    time: float = 0.0
    """When its output arrived, in seconds of a monotonic clock."""
    arm: Arm | None = None
    """What it ended with; None if prompts were in it."""
    ms: float = 0.0
    """Its time for the gate; 0 if it was not counted."""


@dataclass
class SchedulerState:
    """What a scheduler of method "bastion" remembers between steps."""

    gate: Gate
    """Decides what steps end with."""
    choice: Choice = field(default_factory=Choice)
    """What the step that was scheduled last ends with."""
    last: LastStep = field(default_factory=LastStep)
    """The step whose output arrived last."""
    blocked_at: int | None = None
    """Running requests beside which the waiting ones did not fit into the KV cache."""
    blocked_for: int = 0
    """Steps left for which this is assumed: something else may have held them up."""
    lines: defaultdict[tuple[int, Arm], StepLine] = field(
        default_factory=lambda: defaultdict(StepLine)
    )
    """By size class and arm: corrects the profile's times by measured ones."""
    collector: Collector = field(default_factory=Collector)
    """Adds up the records of steps."""
    ngram_key: bytes = field(default_factory=partial(token_bytes, 32))
    """A new one ends all groups of requests that see each other's replies."""

    def observe(
        self, scheduled: Any, plan: Any, tokens: int, predicted_ms: float, now: float
    ) -> None:
        """Measure a step that emitted so many tokens, and whose output arrived at `now`.

        scheduled, plan: its SchedulerOutput and its StepPlan.
        """
        last, arm, ms = self.last, None, 0.0
        reqs, drafts = len(scheduled.num_scheduled_tokens), scheduled.scheduled_spec_decode_tokens
        nodes = sum(map(len, drafts.values())) if drafts else 0
        if scheduled.total_num_scheduled_tokens == reqs + nodes:  # no prompts
            arm = plan.arm
            if last.arm == arm == plan.verified:
                ms = (now - last.time) * 1e3
            counts = self.gate.observe(plan.verified, reqs, tokens, ms)
            if counts and predicted_ms > 0.0:
                self.lines[size_class(reqs), plan.verified].add(predicted_ms, ms)
        last.time, last.arm, last.ms = now, arm, ms

    def ngram_group(self, salt: str | None, adapter: str | None) -> int:
        """The group, not 0, of requests with this `cache_salt` and adapter."""
        words = repr((salt, adapter)).encode()
        digest = blake2b(words, digest_size=8, key=self.ngram_key).digest()
        return int.from_bytes(digest, "big") >> 1 | 1
