# SPDX-License-Identifier: Apache-2.0
"""Records of steps, their sums, and what is written from them."""

from __future__ import annotations

import math
from typing import Any

import pytest
from registries import registered
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from vllm_bastion.telemetry import collector as core
from vllm_bastion.telemetry.collector import GAIN, KEY, PERIOD, TREES, Collector, by_drafter
from vllm_bastion.telemetry.counts import Counts, StepRecord, add, from_plain, to_plain
from vllm_bastion.telemetry.text import interval_line


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def tree(nodes: list[int], accepted: list[int], *values: Any) -> StepRecord:
    return StepRecord("tree", "fastest", len(nodes), len(nodes), sum(nodes), sum(accepted), *values)


def steps() -> list[StepRecord]:
    return [
        tree([16, 3], [4, 0], 5.5, 4.0, [9, 1, 9, 1, 2, 1]),
        tree([1], [1], 0.5, 6.0, [0, 0, 1, 0, 0, 1]),
        StepRecord("plain", "exploration", 2, ms=1.5),
        StepRecord("prompt"),
    ]


def total(records: list[StepRecord]) -> Counts:
    out = Counts()
    for record in records:
        add(out, record)
    return out


def sent(counts: Counts) -> Counts:
    """Through vLLM's msgpack, as from the engine core to a front end."""
    stats = SchedulerStats(kv_connector_stats={KEY: to_plain(counts)})
    found = MsgpackDecoder(SchedulerStats).decode(MsgpackEncoder().encode(stats))
    return from_plain(found.kv_connector_stats[KEY])


def test_sums_are_those_of_the_steps() -> None:
    assert +total(steps()) == {
        ("steps", "tree", "fastest"): 2, ("steps", "plain", "exploration"): 1,
        ("steps", "prompt", ""): 1, ("trees",): 3, ("nodes",): 20, ("accepted_tokens",): 5,
        ("request_steps",): 5, ("timed_steps", "tree"): 2, ("step_ms", "tree"): 10.0,
        ("timed_steps", "plain"): 1, ("step_ms", "plain"): 1.5, ("expected_tokens",): 6.0,
        ("nodes_by_source", "drafter"): 9, ("nodes_by_source", "lookup"): 1,
        ("nodes_by_source", "both"): 10, ("accepted_by_source", "drafter"): 1,
        ("accepted_by_source", "lookup"): 2, ("accepted_by_source", "both"): 2,
    }  # fmt: skip


def test_sums_survive_msgpack_and_add_up() -> None:
    """However steps are split between sums, the sum of the sums is the same."""
    records = steps()
    for cut in range(len(records) + 1):
        assert sent(total(records[:cut])) + sent(total(records[cut:])) == +total(records)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Warnings of the engine core."""
    found: list[str] = []
    monkeypatch.setattr(core.logger, "warning", lambda text, *args: found.append(text % args))
    return found


def test_a_drafter_that_does_not_fit_is_told_once(told: list[str]) -> None:
    collector = Collector()
    for i in range(TREES - 1):
        collector.add(tree([8], [int(i == 3)]))
    assert not told
    collector.add(tree([8], [0]))
    (warning,) = told
    assert f"{TREES} trees had 1 draft tokens" in warning and "chat template" in warning
    collector.add(tree([8] * TREES, [0] * TREES))
    assert len(told) == 1


def test_a_drafter_that_fits_is_not_told(told: list[str]) -> None:
    collector = Collector()
    for _ in range(TREES):
        collector.add(tree([8] * 4, [1, 0, 0, 0]))
    # One that fits may begin badly.
    collector.add(tree([8] * (TREES - 1), [0] * (TREES - 1)))
    collector.add(tree([TREES], [TREES]))
    assert not told


def test_ngram_drafts_carry_no_signal_about_the_drafter(told: list[str]) -> None:
    ngrams = tree([6, 6], [6, 5], 0.0, 0.0, [0, 12, 0, 0, 11, 0])
    both = tree([8], [4], 0.0, 0.0, [4, 3, 1, 0, 3, 1])
    found = [by_drafter(one) for one in (ngrams, both)]
    assert found == [(0, 0), (1, 1)]
    assert by_drafter(tree([8, 3], [2, 0])) == (2, 2)
    collector = Collector()
    for _ in range(TREES):
        collector.add(ngrams)
        collector.add(tree([8], [3], 0.0, 0.0, [5, 3, 0, 0, 3, 0]))
    assert len(told) == 1 and f"{TREES} trees had 0 draft tokens" in told[0]


def test_the_collector_hands_on_sums_now_and_then_and_loses_nothing() -> None:
    clock = Clock()
    collector = Collector(clock)
    assert collector.due(idle=True) and collector.take(None) is None
    taken = []
    for i in range(100):
        clock.now += 0.01
        collector.add(tree([4], [2]))
        if collector.due(idle=i == 99):
            taken.append(collector.take(1.5) or {})
    assert len(taken) == pytest.approx(1.0 / PERIOD, abs=2)
    assert sum(t["trees"] for t in taken) == 100
    assert sum(t["accepted_tokens"] for t in taken) == 200
    assert taken[-1][GAIN] == 1.5 and collector.whole()["nodes",] == 400
    assert not collector.whole()


def samples(registry: Any) -> dict[tuple[str, ...], float]:
    """(name without prefix, label values but the model's, in order of names) -> value."""
    out = {}
    for family in registry.collect():
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                labels = [v for k, v in sorted(sample.labels.items()) if k != "model_name"]
                out[sample.name.removeprefix("vllm:bastion_"), *labels] = sample.value
    return out


def test_prometheus_has_the_sums_with_vllms_labels() -> None:
    registry, metrics = registered({0: ["tiny", "0"], 1: ["tiny", "1"]})
    for record in steps():
        metrics.observe(total([record]), None, 0)
    metrics.observe(total(steps()), 1.25, 1)
    got = samples(registry)
    assert got["measured_gain", "0"] != got["measured_gain", "0"]  # NaN
    assert got["measured_gain", "1"] == 1.25
    for engine in ("0", "1"):
        assert got["steps_total", engine, "tree", "fastest"] == 2
        assert got["steps_total", engine, "plain", "exploration"] == 1
        assert got["nodes_by_source_total", engine, "both"] == 10
        assert got["accepted_by_source_total", engine, "lookup"] == 2
        assert got["expected_tokens_total", engine] == 6.0
        assert got["request_steps_total", engine] == got["accepted_tokens_total", engine] == 5
        assert got["timed_steps_total", engine, "tree"] == 2
        assert got["step_ms_total", engine, "tree"] == 10


@pytest.mark.parametrize("wrong", [-5.0, math.nan, math.inf])
def test_a_time_or_a_score_that_cannot_be_disturbs_no_counter(wrong: float) -> None:
    """A clock that was set back; a counter would raise, or stay NaN."""
    registry, metrics = registered({0: ["tiny", "0"]})
    for expected, ms in ((0.5, 4.0), (wrong, wrong), (0.25, 6.0)):
        metrics.observe(sent(total([tree([3], [1], expected, ms)])), None, 0)
    got = samples(registry)
    assert got["steps_total", "0", "tree", "fastest"] == 3
    assert got["expected_tokens_total", "0"] == 0.75
    assert (got["timed_steps_total", "0", "tree"], got["step_ms_total", "0", "tree"]) == (2, 10)


def test_the_line_says_what_happened_and_why() -> None:
    assert interval_line(Counts(), None) is None
    assert interval_line(total([StepRecord("prompt")]), 1.5) is None
    assert interval_line(total(steps()), 1.5) == (
        "Bastion: 6.7 nodes and 1.67 accepted tokens per tree; "
        "n-gram drafts 55% of nodes and 80% of accepted tokens; tree steps 67% (fastest); "
        "plain steps 33% (exploration); tree step 5.00 ms; plain step 1.50 ms; "
        "measured 1.50x of plain decoding"
    )
    reasons = ("fastest", "fastest", "prompts wait")
    plain = total([StepRecord("plain", reason, 1) for reason in reasons])
    assert interval_line(plain, None) == (
        "Bastion: plain steps 100% (fastest 67%, prompts wait 33%)"
    )
