# SPDX-License-Identifier: Apache-2.0
"""Records of steps, their sums, and what is written from them."""

from __future__ import annotations

from typing import Any

import pytest
from registries import registered
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from vllm_bastion.telemetry.collector import KEY, Collector
from vllm_bastion.telemetry.drafter_fit import NEAR_ZERO_TREES, TREES, DrafterFit
from vllm_bastion.telemetry.record import (
    MOST_PENDING,
    NODE_BUCKETS,
    PERIOD,
    StepRecord,
    Totals,
    bucket_of,
    drafted,
)
from vllm_bastion.telemetry.text import interval_line


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def tree(nodes: list[int], accepted: list[int], *values: Any) -> StepRecord:
    return StepRecord("tree", "fastest", len(nodes), nodes, accepted, *values)


def steps() -> list[StepRecord]:
    return [
        tree([16, 3], [4, 0], 5.5, 4.0, [9, 1, 9, 1, 2, 1]),
        tree([1], [1], 0.5, 6.0, [0, 0, 1, 0, 0, 1]),
        StepRecord("plain", "exploration", 2, ms=1.5),
        StepRecord("prompt"),
    ]


def total(records: list[StepRecord]) -> Totals:
    out = Totals()
    out.add(records)
    return out


def sent(totals: Totals) -> Totals:
    """Through vLLM's msgpack, as from the engine core to a front end."""
    stats = SchedulerStats(kv_connector_stats={KEY: totals.to_plain()})
    found = MsgpackDecoder(SchedulerStats).decode(MsgpackEncoder().encode(stats))
    return Totals.from_plain(found.kv_connector_stats[KEY])


def test_sums_are_those_of_the_steps() -> None:
    got = total(steps())
    assert got.steps == {("tree", "fastest"): 2, ("plain", "exploration"): 1, ("prompt", ""): 1}
    assert (got.trees, got.nodes, got.accepted, got.request_steps) == (3, 20, 5, 5)
    assert got.trees_by_depth == [1, 1, 0, 0, 1]
    # A path of 4 tokens reaches depths 1 to 4.
    assert got.accepted_by_depth == [2, 1, 1, 1]
    assert sum(got.accepted_by_depth) == got.accepted
    assert got.trees_by_nodes[:5] == [1, 0, 1, 0, 1] and sum(got.trees_by_nodes) == got.trees
    assert got.times == {"tree": (2, 10.0), "plain": (1, 1.5)}
    assert got.sources == [9, 1, 10, 1, 2, 2] and got.expected == 6.0 and got.gain is None


def test_buckets_are_powers_of_two() -> None:
    for count in range(1, 600):
        bound = 1 << bucket_of(count)
        assert bound >= count and bound // 2 < count
    assert 1 << (NODE_BUCKETS - 1) >= 512


def test_sums_survive_msgpack_and_add_up() -> None:
    """However steps are split between sums, the sum of the sums is the same."""
    records = steps()
    for cut in range(len(records) + 1):
        first, second = sent(total(records[:cut])), sent(total(records[cut:]))
        first.merge(second)
        assert first == total(records)


def fit(clock: Clock) -> DrafterFit:
    return DrafterFit("some/drafter", "some/target", 4096, clock)


def test_a_drafter_that_does_not_fit_is_told_once_an_hour() -> None:
    clock = Clock()
    judge = fit(clock)
    assert all(judge.observe(1, 0) is None for _ in range(NEAR_ZERO_TREES - 1))
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
    assert judge.observe(NEAR_ZERO_TREES - 2, 0) is None
    assert judge.observe(1, 1) is None
    warning = judge.observe(1, 0)
    assert warning is not None and f"{NEAR_ZERO_TREES} trees had 1 draft tokens" in warning
    # One that fits may begin badly.
    judge = fit(Clock())
    assert judge.observe(NEAR_ZERO_TREES - 1, 0) is None
    assert judge.observe(1, 5) is None and judge.observe(NEAR_ZERO_TREES, 0) is None


def test_a_drafter_that_fits_is_not_told() -> None:
    judge = fit(Clock())
    assert all(judge.observe(4, 1) is None for _ in range(TREES))
    assert judge.observe(999, 0) is None
    # Only the last thousand trees count.
    assert judge.observe(1, 1000) is None


def test_ngram_drafts_carry_no_signal_about_the_drafter() -> None:
    ngrams = StepRecord(nodes=[6, 6], accepted=[6, 5], sources=[0, 12, 0, 0, 11, 0])
    both = StepRecord(nodes=[8], accepted=[4], sources=[4, 3, 1, 0, 3, 1])
    assert drafted([ngrams]) == (0, 0) and drafted([ngrams, both]) == (1, 1)
    assert drafted([StepRecord(nodes=[8, 3], accepted=[2, 0])]) == (2, 2)
    told: list[str] = []
    collector = Collector(fit(Clock()), told.append)
    for _ in range(NEAR_ZERO_TREES):
        collector.add(ngrams)
        collector.add(StepRecord(nodes=[8], accepted=[3], sources=[5, 3, 0, 0, 3, 0]))
    collector.take(None)
    assert len(told) == 1 and f"{NEAR_ZERO_TREES} trees had 0 draft tokens" in told[0]


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
    assert collector.due(idle=True) and collector.take(None) is None
    taken = []
    for i in range(100):
        clock.now += 0.01
        collector.add(tree([4], [2]))
        if collector.due(idle=i == 99):
            taken.append(Totals.from_plain(collector.take(1.5)))
    assert len(taken) == pytest.approx(1.0 / PERIOD, abs=2)
    assert sum(t.trees for t in taken) == 100 and sum(t.accepted for t in taken) == 200
    assert taken[-1].gain == 1.5
    assert not warnings
    # Trees are judged even if nothing is taken.
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
    registry, metrics = registered({0: ["tiny", "0"], 1: ["tiny", "1"]})
    for record in steps():
        metrics.observe(total([record]), 0)
    whole = total(steps())
    whole.gain = 1.25
    metrics.observe(whole, 1)
    got = samples(registry)
    assert got["measured_gain", "0"] != got["measured_gain", "0"]  # NaN
    assert got["measured_gain", "1"] == 1.25
    for engine in ("0", "1"):
        assert got["steps_total", engine, "tree", "fastest"] == 2
        assert got["steps_total", engine, "plain", "exploration"] == 1
        assert got["nodes_verified_count", engine] == 3
        assert got["nodes_verified_sum", engine] == 20
        below = [got["nodes_verified_bucket", engine, f"{2.0**i}"] for i in range(5)]
        assert below == [1, 1, 2, 2, 3]
        assert [got["accepted_by_depth_total", d, engine] for d in "1234"] == [2, 1, 1, 1]
        assert got["nodes_by_source_total", engine, "both"] == 10
        assert got["accepted_by_source_total", engine, "lookup"] == 2
        assert got["expected_tokens_total", engine] == 6.0
        assert got["request_steps_total", engine] == got["accepted_tokens_total", engine] == 5
        assert got["timed_steps_total", engine, "tree"] == 2
        assert got["step_ms_total", engine, "tree"] == 10


def test_the_line_says_what_happened_and_why() -> None:
    assert interval_line(Totals()) is None
    assert interval_line(total([StepRecord("prompt")])) is None
    totals = total(steps())
    totals.gain = 1.5
    assert interval_line(totals) == (
        "Bastion: 6.7 nodes and 1.67 accepted tokens per tree; "
        "n-gram drafts 55% of nodes and 80% of accepted tokens; tree steps 67% (fastest); "
        "plain steps 33% (exploration); tree step 5.00 ms; plain step 1.50 ms; "
        "measured 1.50x of plain decoding"
    )
    reasons = ("fastest", "fastest", "prompts wait")
    assert interval_line(total([StepRecord("plain", reason, 1) for reason in reasons])) == (
        "Bastion: plain steps 100% (fastest 67%, prompts wait 33%)"
    )
