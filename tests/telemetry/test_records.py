# SPDX-License-Identifier: Apache-2.0
"""Records of steps, their sums, their way to the front end, and what is written from them."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
from registries import registered
from vllm_bastion.telemetry.recorder import NO_TREE, Recorder

from vllm_bastion.telemetry.collector import Collector
from vllm_bastion.telemetry.drafter_fit import BARREN_TREES, TREES, DrafterFit
from vllm_bastion.telemetry.record import (
    MOST_PENDING,
    NODE_BUCKETS,
    PERIOD,
    StepRecord,
    StepTime,
    Totals,
    bucket_of,
    drafted,
)
from vllm_bastion.telemetry.text import interval_line

ROOT = Path(__file__).resolve().parents[2]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def tree(nodes: list[int], accepted: list[int], **values: Any) -> StepRecord:
    return StepRecord(
        "tree", "pays", len(nodes), sum(nodes) + len(nodes), nodes, accepted, **values
    )


def steps() -> list[StepRecord]:
    times = [StepTime("tree", 17, 3.0, 4.0), StepTime("tree", 32, 5.0, 6.0)]
    return [
        tree([16, 3], [4, 0], promised=5.5, yielded=4.0, plain_ms=6.0, step_ms=4.0, times=times),
        tree([1], [1], now={"tree": 1.25, "rows": 0.5}),
        StepRecord("plain", "does not pay", 2, 2, times=[StepTime("plain", 2, 1.0, 1.5)]),
        StepRecord("prompt", "", 0, 100),
    ]


def total(records: list[StepRecord]) -> Totals:
    out = Totals()
    out.add(records)
    return out


def test_sums_are_those_of_the_steps() -> None:
    got = total(steps())
    assert got.steps == {("tree", "pays"): 2, ("plain", "does not pay"): 1, ("prompt", ""): 1}
    assert (got.trees, got.nodes, got.accepted) == (3, 20, 5)
    assert got.trees_by_depth == [1, 1, 0, 0, 1]
    # A path of 4 tokens reaches depths 1 to 4.
    assert got.accepted_by_depth == [2, 1, 1, 1]
    assert sum(got.accepted_by_depth) == got.accepted
    assert got.trees_by_nodes[:5] == [1, 0, 1, 0, 1] and sum(got.trees_by_nodes) == got.trees
    assert got.times == {("tree", 32): (2, 8.0, 10.0), ("plain", 2): (1, 1.0, 1.5)}
    assert got.gain == 1.5 and got.now == {"tree": 1.25, "rows": 0.5}


def test_nodes_and_tokens_by_source_add_up() -> None:
    records = steps()
    records[0].sources, records[1].sources = [9, 1, 2, 1, 1, 0], [0, 0, 8, 0, 0, 3]
    got = total(records)
    assert got.sources == [9, 1, 10, 1, 1, 3]
    sent = Totals.from_plain(json.loads(json.dumps(got.to_plain())))
    sent.merge(total(records[1:]))
    assert sent.sources == [9, 1, 18, 1, 1, 6]
    line = interval_line(got)
    assert line is not None
    # 11 of 20 nodes, 4 of 5 tokens.
    assert "copies of the context 55% of nodes and 80% of accepted tokens" in line
    assert "copies" not in str(interval_line(total(steps())))


def test_buckets_are_powers_of_two() -> None:
    for count in range(1, 600):
        bound = 1 << bucket_of(count)
        assert bound >= count and bound // 2 < count
    assert 1 << (NODE_BUCKETS - 1) >= 512


def test_sums_survive_json_and_add_up() -> None:
    """However steps are split between sums, the sum of the sums is the same."""
    records = steps()
    for cut in range(len(records) + 1):
        first, second = total(records[:cut]), total(records[cut:])
        sent = [Totals.from_plain(json.loads(json.dumps(t.to_plain()))) for t in (first, second)]
        assert sent == [first, second]
        sent[0].merge(sent[1])
        assert sent[0] == total(records)


def test_a_step_is_named_by_the_decision_that_was_made_for_it() -> None:
    recorder = Recorder("tree", "no gate")

    def step(requests: int, nodes: int, prompt_rows: int = 0, tokens: int = 0) -> StepRecord:
        recorder.ended(requests, nodes, requests + nodes + prompt_rows, tree_ms=4.0)
        record = recorder.take()
        recorder.finish(record, [nodes] if nodes else [], [tokens] if nodes else [])
        return record

    # The prompt's last step decides about the first step that decodes.
    recorder.decided(True, "pays", 1, math.inf)
    assert (step(0, 0, prompt_rows=9).kind, step(1, 8).reason) == ("prompt", "pays")
    recorder.decided(False, "does not pay", 1, 3.0)
    assert step(1, 8).reason == "pays"
    record = step(1, 0)
    assert (record.kind, record.reason) == ("plain", "does not pay")
    # A plain step costs what plain decoding costs.
    assert (record.plain_ms, record.step_ms) == (3.0, 3.0)
    recorder.decided(True, "trial", 1, 3.0)
    step(1, 0)
    record = step(1, 8, tokens=3)
    assert (record.kind, record.reason) == ("tree", "trial")
    # Four tokens, which take plain decoding 12 ms; the step takes 4 ms.
    assert (record.plain_ms, record.step_ms) == (12.0, 4.0)
    # The gate wanted a tree, but there is none.
    assert step(1, 0).reason == NO_TREE
    # Costs are unknown for a step with prompts, and for another batch than the decision's.
    assert (step(1, 8, prompt_rows=5).step_ms, step(2, 8).step_ms) == (0.0, 0.0)


def test_an_engine_without_a_gate_has_its_own_reason() -> None:
    recorder = Recorder("chain", "fixed budget")
    recorder.ended(1, 8, 9, tree_ms=1.0)
    record = recorder.take()
    assert (record.kind, record.reason, record.step_ms) == ("chain", "fixed budget", 0.0)


def test_recording_a_step_takes_few_calls() -> None:
    """Operations are counted, not timed: calls of Python functions and of C functions."""
    latest = lambda: {"tree": 1.0, "rows": 1.0}  # noqa: E731
    recorder, calls = Recorder("tree", "no gate", latest), 0
    collector = Collector(fit(Clock()), print)

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    def step(requests: int) -> None:
        recorder.decided(True, "pays", requests, 3.0)
        recorder.timed(True, 17 * requests, 4.0, 4.0)
        recorder.yielded(4.0, 3.0)
        recorder.ended(requests, 16 * requests, 17 * requests, 4.0)
        record = recorder.take()
        recorder.finish(record, [16] * requests, [3] * requests)
        collector.add(record)  # as the engine core does
        collector.due(idle=False)

    counts = []
    for requests in (1, 65):
        step(requests)
        calls = 0
        sys.setprofile(count)
        for _ in range(MOST_PENDING):
            step(requests)
        sys.setprofile(None)
        counts.append(calls / MOST_PENDING)
    one, more = counts
    assert one < 32
    # Of each further request, in both processes together: nothing is called for each.
    assert (more - one) / 64 < 0.5


def fit(clock: Clock) -> DrafterFit:
    return DrafterFit("some/drafter", "some/target", 4096, clock)


def test_a_drafter_that_does_not_fit_is_told_once_an_hour() -> None:
    clock = Clock()
    judge = fit(clock)
    assert all(judge.observe(1, 0) is None for _ in range(BARREN_TREES - 1))
    warning = judge.observe(1, 0)
    assert warning is not None
    for words in ("some/drafter", "some/target", "chat template", "4096", "quantised", "target"):
        assert words in warning
    clock.now = 3599.0
    assert judge.observe(TREES, 0) is None
    clock.now = 3600.0
    assert judge.observe(TREES, 0) is not None


def test_a_token_that_is_accepted_by_chance_does_not_delay_the_warning() -> None:
    judge = fit(Clock())
    assert judge.observe(BARREN_TREES - 2, 0) is None
    assert judge.observe(1, 1) is None
    warning = judge.observe(1, 0)
    assert warning is not None and f"{BARREN_TREES} trees yielded 1 draft tokens" in warning
    # One that fits may begin badly.
    judge = fit(Clock())
    assert judge.observe(BARREN_TREES - 1, 0) is None
    assert judge.observe(1, 5) is None and judge.observe(BARREN_TREES, 0) is None


def test_a_drafter_that_fits_is_not_told() -> None:
    judge = fit(Clock())
    assert all(judge.observe(4, 1) is None for _ in range(TREES))
    assert judge.observe(999, 0) is None
    # Only the last thousand trees count.
    assert judge.observe(1, 1000) is None


def test_copies_say_nothing_of_the_drafter() -> None:
    """Copies are right where the drafter never is, and a tree may hold copies alone."""
    copies = StepRecord(nodes=[6, 6], accepted=[6, 5], sources=[0, 12, 0, 0, 11, 0])
    both = StepRecord(nodes=[8], accepted=[4], sources=[4, 3, 1, 0, 3, 1])
    assert drafted([copies]) == (0, 0) and drafted([copies, both]) == (1, 1)
    assert drafted([StepRecord(nodes=[8, 3], accepted=[2, 0])]) == (2, 2)
    told: list[str] = []
    collector = Collector(fit(Clock()), told.append)
    wrong = StepRecord(nodes=[8], accepted=[3], sources=[5, 3, 0, 0, 3, 0])
    for _ in range(BARREN_TREES):
        collector.add(copies)
        collector.add(wrong)
    collector.take()
    assert len(told) == 1 and f"{BARREN_TREES} trees yielded 0 draft tokens" in told[0]


def test_a_context_beyond_the_drafters_training_is_told_once_an_hour() -> None:
    clock = Clock()
    judge = fit(clock)
    assert judge.observe_context(4096) is None
    warning = judge.observe_context(4097)
    assert warning is not None and "4097" in warning and "4096" in warning
    assert judge.observe_context(9999) is None
    clock.now = 3600.0
    assert judge.observe_context(9999) is not None
    assert DrafterFit("d", "t", None).observe_context(10**9) is None


def test_the_collector_hands_on_sums_now_and_then_and_loses_nothing() -> None:
    clock, warnings = Clock(), []
    collector = Collector(fit(clock), warnings.append, clock)
    assert collector.due(idle=True) and collector.take() is None
    taken = []
    for i in range(100):
        clock.now += 0.01
        collector.add(tree([4], [2], plain_ms=3.0, step_ms=2.0))
        if collector.due(idle=i == 99):
            taken.append(Totals.from_plain(collector.take()))
    assert len(taken) == pytest.approx(1.0 / PERIOD, abs=2)
    assert sum(t.trees for t in taken) == 100 and sum(t.accepted for t in taken) == 200
    assert taken[-1].now["gain"] == pytest.approx(1.5)
    assert not warnings
    # Without statistics nothing is taken, and the trees are judged all the same.
    for _ in range(MOST_PENDING):
        collector.add(tree([1] * TREES, [0] * TREES))
    assert len(warnings) == 1


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
    values = {0: ["tiny", "0"], 1: ["tiny", "1"]}
    registry, metrics = registered(values)
    for record in steps():
        metrics.observe(total([record]), 0)
    metrics.observe(total(steps()), 1)
    got = samples(registry)
    for engine in ("0", "1"):
        assert got["steps_total", engine, "tree", "pays"] == 2
        assert got["steps_total", engine, "plain", "does not pay"] == 1
        assert got["nodes_verified_count", engine] == 3
        assert got["nodes_verified_sum", engine] == 20
        below = [got["nodes_verified_bucket", engine, f"{2.0**i}"] for i in range(5)]
        assert below == [1, 1, 2, 2, 3]
        assert [got["accepted_by_depth_total", d, engine] for d in "1234"] == [2, 1, 1, 1]
        assert got["promised_tokens_total", engine] == 5.5
        assert got["yielded_tokens_total", engine] == 4
        assert got["timed_steps_total", engine, "tree", "32"] == 2
        assert got["predicted_step_ms_total", engine, "tree", "32"] == 8
        assert got["measured_step_ms_total", engine, "tree", "32"] == 10
        assert got["plain_equivalent_ms_total", engine] == 6
        assert got["decode_ms_total", engine] == 4
        assert got["correction_factor", engine, "rows"] == 0.5


_SERVER = """
import sys
from vllm_bastion.telemetry.prometheus import TreeMetrics
from vllm_bastion.telemetry.record import StepRecord, Totals
metrics = TreeMetrics(["model_name", "engine"], {0: ["tiny", "0"]})
sums = Totals()
step = StepRecord("tree", "pays", 1, 9, [8], [2], now={"tree": float(sys.argv[1])})
sums.add([step] * int(sys.argv[1]))
metrics.observe(sums, 0)
"""


def test_several_front_ends_add_up(tmp_path: Path) -> None:
    """Each API server counts a part; any of them shows the whole, as vLLM's /metrics does."""
    from prometheus_client import multiprocess

    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for count in ("3", "5"):
        subprocess.run(
            [sys.executable, "-c", _SERVER, count], check=True, cwd=ROOT, env=environment
        )
    registry = prometheus_client.CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, path=str(tmp_path))
    got = samples(registry)
    assert got["steps_total", "0", "tree", "pays"] == 8
    assert got["nodes_verified_count", "0"] == 8 and got["nodes_verified_sum", "0"] == 64
    assert got["nodes_verified_bucket", "0", "8.0"] == 8
    assert got["nodes_verified_bucket", "0", "4.0"] == 0
    assert got["correction_factor", "0", "tree"] == 5


def test_the_line_says_what_happened_and_why() -> None:
    assert interval_line(Totals()) is None
    assert interval_line(total([StepRecord("prompt", "", 0, 100)])) is None
    assert interval_line(total([*steps(), tree([], [])])) == (
        "Bastion: 6.7 nodes and 1.67 accepted tokens per tree; tree steps 75% (pays); "
        "plain steps 25% (does not pay); tree step predicted 4.00 ms, measured 5.00 ms; "
        "plain step predicted 1.00 ms, measured 1.50 ms; "
        "estimated gain over plain decoding 1.50x"
    )
    mixed = [
        StepRecord("plain", reason, 1, 1)
        for reason in ("does not pay", "does not pay", "prompts wait")
    ]
    assert interval_line(total(mixed)) == (
        "Bastion: plain steps 100% (does not pay 67%, prompts wait 33%)"
    )
