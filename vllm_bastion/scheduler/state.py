# SPDX-License-Identifier: Apache-2.0
"""What the scheduler remembers between steps."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_bastion.scheduler.gate import Arm, Gate
from vllm_bastion.telemetry.collector import Collector


@dataclass
class LastStep:
    """What the gate compares a step's output with: that of the step before."""

    time: float = 0.0
    """When its output arrived, in seconds of a monotonic clock."""
    arm: Arm | None = None
    """What it ended with; None if prompts were in it."""
    ms: float = 0.0
    """What the gate took as its time; 0 if it took none."""


@dataclass
class SchedulerState:
    """What a scheduler of method "bastion" remembers between steps."""

    gate: Gate
    """Decides what steps end with."""
    num_drafts: int = 0
    """K, the placeholders of each request in the step that is scheduled next."""
    arm: Arm = Arm.PLAIN
    """What the step that was scheduled last ends with."""
    reason: str = "not measured yet"
    """Why: a label of metrics."""
    last: LastStep = field(default_factory=LastStep)
    """The step whose output has arrived last."""
    blocked_at: int | None = None
    """Number of running requests at which the waiting ones did not fit into the KV cache."""
    blocked_for: int = 0
    """Steps for which this is believed: something else may have held them up."""
    collector: Collector | None = None
    """Adds up the records of steps; None before the first."""
