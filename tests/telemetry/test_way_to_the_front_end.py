# SPDX-License-Identifier: Apache-2.0
"""A thousand steps from the scheduler through msgpack to a front end's metrics, and to the log."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from registries import registered
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from tests.scheduler_core import call, new_core
from vllm_bastion.attached import StepPlan, StepReport
from vllm_bastion.hooks import scheduler, telemetry
from vllm_bastion.scheduler.gate import Arm, Gate
from vllm_bastion.scheduler.state import SchedulerState
from vllm_bastion.telemetry import collector
from vllm_bastion.telemetry.collector import GAIN
from vllm_bastion.telemetry.counts import Counts, from_plain


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lines and warnings that the engine core logs."""
    lines: list[str] = []
    monkeypatch.setattr(collector.logger, "warning", lambda text, *_: lines.append(text))
    monkeypatch.setattr(scheduler.logger, "info", lines.append)
    return lines


class Core:
    """A scheduler that runs requests 0, 1, ..., and what its front end has."""

    def __init__(self, requests: int) -> None:
        self.scheduler = new_core()
        self.scheduler.running = list(range(requests))
        self.scheduler.state = SchedulerState(Gate((Arm.PLAIN, Arm.TREE)))
        self.registry, self.metrics = registered({0: ["m", "0"]})
        self.sums, self.logged = 0, Counts()

    def step(self, verified: dict[str, int], tokens: dict[str, int]) -> None:
        """A step whose requests verify nodes and return tokens to clients."""
        report = StepReport(verified, expected=0.5 * sum(verified.values()))
        plan, outputs = StepPlan(reason="fastest"), self.outputs(tokens)
        given = [one for one in outputs[0].outputs if one.new_token_ids]
        total = sum(tokens.values())
        record = telemetry.record_of(self.scheduler, plan, report, given, total)
        self.scheduler.state.collector.add(record)
        self.send(outputs)

    def outputs(self, tokens: dict[str, int]) -> dict[int, Any]:
        """Those of a step, by front end."""
        own = [SimpleNamespace(request_id=r, new_token_ids=[0] * n) for r, n in tokens.items()]
        return {0: SimpleNamespace(scheduler_stats=SchedulerStats(), outputs=own)}

    def send(self, outputs: dict[int, Any]) -> None:
        """What follows a step, also an empty one."""
        telemetry.send(self.scheduler, outputs)
        stats = MsgpackDecoder(SchedulerStats).decode(
            MsgpackEncoder().encode(outputs[0].scheduler_stats)
        )
        if stats.kv_connector_stats:
            own = stats.kv_connector_stats["bastion"]
            gain = own.pop(GAIN, None)
            counts = from_plain(own)
            self.metrics.observe(counts, gain, 0)
            self.logged += counts
            self.sums += 1

    def found(self) -> Counter[str]:
        """Metrics of the front end, summed over labels; of steps also by kind."""
        found = Counter[str]()
        for family in self.registry.collect():
            for sample in family.samples:
                name = sample.name.removeprefix("vllm:bastion_")
                found[name] += sample.value
                if name == "steps_total":
                    found[sample.labels["kind"]] += sample.value
        return found


@pytest.mark.parametrize("requests", [1, 12])
def test_nothing_is_lost_on_the_way(said: list[str], requests: int) -> None:
    core, draw, told = Core(requests), random.Random(0), Counter[str]()
    for step in range(1000):
        verified, tokens = {}, {}
        for i in range(requests):
            # A request that has stopped gets no tokens, whatever it verifies.
            if draw.random() < 0.8:
                verified[str(i)] = draw.choice((1, 7, 63))
            if draw.random() < 0.9:
                tokens[str(i)] = draw.randint(1, 6) if str(i) in verified else 1
        trees = [name for name in verified if name in tokens]
        told["trees"] += len(trees)
        told["nodes"] += sum(verified[name] for name in trees)
        told["expected"] += 0.5 * sum(verified.values())
        told["tokens"] += sum(tokens.values())
        told["tree"] += bool(trees)
        told["plain"] += bool(tokens) and not trees
        core.scheduler.running = core.scheduler.running if step < 999 else []
        core.step(verified, tokens)
    found = core.found()
    assert 1 < core.sums < 1000
    assert found["steps_total"] == 1000
    assert (found["tree"], found["plain"]) == (told["tree"], told["plain"])
    assert core.logged["nodes",] == told["nodes"]
    assert core.logged["trees",] == told["trees"]
    assert found["request_steps_total"] + found["accepted_tokens_total"] == told["tokens"]
    assert found["expected_tokens_total"] == told["expected"]
    assert not said


def test_counts_arrive_when_the_last_request_is_aborted(said: list[str]) -> None:
    """vLLM then runs one more step, without a token."""
    core = Core(1)
    for _ in range(10):
        core.step({"0": 8}, {"0": 3})
    assert core.found()["steps_total"] < 10
    core.scheduler.running = []
    core.send(core.outputs({}))
    assert core.found()["steps_total"] == 10


def test_an_engine_core_that_ends_says_once_what_the_run_drafted(said: list[str]) -> None:
    core = Core(1)
    call(core.scheduler, "shutdown", lambda: None)
    assert not said, "nothing was decoded"
    for _ in range(4):
        core.step({"0": 8, "1": 8}, {"0": 4, "1": 3})
    for _ in range(2):
        call(core.scheduler, "shutdown", lambda: None)
    (line,) = said
    assert line == (
        "Bastion, the whole run: 8.0 nodes and 2.50 accepted tokens per tree; "
        "tree steps 100% (fastest)"
    )
