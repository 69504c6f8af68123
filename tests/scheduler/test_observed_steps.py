# SPDX-License-Identifier: Apache-2.0
"""What the gate is told of the steps whose output has arrived."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_bastion.attached import StepPlan
from vllm_bastion.scheduler.gate import Arm
from vllm_bastion.scheduler.state import SchedulerState

PLAIN, TREE = Arm.PLAIN, Arm.TREE


class Told:
    """In place of a gate: what it observes, with milliseconds as whole numbers."""

    def __init__(self) -> None:
        self.steps: list[tuple[Arm, int, int, int]] = []

    def observe(self, arm: Arm, num_reqs: int, tokens: int, ms: float) -> bool:
        self.steps.append((arm, num_reqs, tokens, round(ms)))
        return ms > 0


def step(verified: Arm, arm: Arm, emitted: list[int], prompt: int = 0) -> tuple[Any, ...]:
    """A step with 3 nodes of each request if it verifies trees, and so many prompt tokens."""
    names = [str(i) for i in range(len(emitted))]
    nodes = {name: [-1] * 3 for name in names if verified == TREE}
    tokens = {name: 1 + len(nodes.get(name, ())) for name in names}
    if prompt:
        tokens["p"] = prompt
    scheduled = SimpleNamespace(
        num_scheduled_tokens=tokens,
        scheduled_spec_decode_tokens=nodes,
        total_num_scheduled_tokens=sum(tokens.values()),
    )
    return scheduled, StepPlan(verified=verified, arm=arm), sum(emitted)


def test_only_steps_between_others_of_their_arm_are_timed() -> None:
    state: Any = SchedulerState(Told())  # type: ignore[arg-type]
    now, told = 100.0, []
    steps = [
        (1, step(TREE, TREE, [2, 3]), (TREE, 2, 5, 0)),  # the first
        (2, step(TREE, TREE, [2, 1]), (TREE, 2, 3, 2)),
        (3, step(TREE, PLAIN, [4]), (TREE, 1, 4, 0)),  # a draft is missing
        (4, step(PLAIN, PLAIN, [1]), (PLAIN, 1, 1, 4)),
        (5, step(PLAIN, TREE, [1]), (PLAIN, 1, 1, 0)),  # a draft follows
        (6, step(TREE, TREE, [2], prompt=50), None),
        (7, step(TREE, TREE, [2]), (TREE, 1, 2, 0)),  # the device may still compute prompts
        (8, step(TREE, TREE, [2]), (TREE, 1, 2, 8)),
    ]
    for ms, observed, expected in steps:
        now += ms / 1e3
        told += [expected] if expected else []
        state.observe(*observed, 3.0, now)
        assert state.gate.steps == told
        assert round(state.last.ms) == (expected[3] if expected else 0)
    assert {key: line() for key, line in state.lines.items()} == {
        (1, TREE): (1.0, pytest.approx(2 - 3.0)),
        (0, PLAIN): (1.0, pytest.approx(4 - 3.0)),
        (0, TREE): (1.0, pytest.approx(8 - 3.0)),
    }
