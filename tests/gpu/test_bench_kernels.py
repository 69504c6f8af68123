# SPDX-License-Identifier: Apache-2.0
"""The kernel benchmark: no timing without a check, and verdicts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from bastion_kernels import accept_path
from benchmarks.gpu.attention_case import in_turn
from benchmarks.gpu.bench_kernels import Report, line, main
from benchmarks.gpu.cases import cases
from benchmarks.gpu.harness import (
    FA3,
    OF_COPY,
    US,
    Bar,
    Call,
    Case,
    Ceilings,
    Entry,
    Rival,
    Row,
    Timing,
    run_entry,
)
from benchmarks.gpu.shapes import QWEN3_8B, TINY

CEILINGS = Ceilings(copy=4000.0, matmul=800.0)


def passes() -> None:
    pass


def fails() -> None:
    raise AssertionError("rows\ndiffer")


def taking(microseconds: float) -> Call:
    """A call that `timer` reports as taking this long."""

    def call() -> float:
        return microseconds

    return call


def timer(calls: Sequence[Call], replays: int) -> Timing:
    median = float(calls[0]())  # type: ignore[arg-type]
    return Timing(median, median - 1, median + 1, sm_mhz=1980)


def never(calls: Sequence[Call], replays: int) -> Timing:
    raise AssertionError("timed")


def entry(bar: Bar | None = None, check: Call = passes, rivals: Sequence[Rival] = ()) -> Entry:
    """A case of 20 us per call that moves 20 MB."""
    case = Case(check, [taking(20.0)], 20_000_000, 1_600_000_000, rivals=rivals)
    return Entry("walk", "walk", lambda: case, bar)


def rival(name: str, microseconds: float, check: Call = passes) -> Rival:
    return Rival(name, lambda: ([taking(microseconds)], check))


def test_a_case_whose_check_fails_is_not_timed() -> None:
    row = run_entry(entry(check=fails), CEILINGS, 10, never)
    assert row.timing is None and row.failed == "check"
    assert row.error == "AssertionError: rows differ"
    assert "CHECK FAILED, not timed: AssertionError: rows differ" in line(row)
    assert "timing" not in row.as_json() and "fails" in row.as_json()["traceback"]


def test_a_case_that_cannot_be_built_or_timed_is_reported_and_stops_nothing() -> None:
    def explodes() -> Case:
        raise MemoryError("out of memory")

    row = run_entry(Entry("walk", "walk", explodes), CEILINGS, 10, never)
    assert "BUILD FAILED, not timed: MemoryError: out of memory" in line(row)
    row = run_entry(entry(), CEILINGS, 10, never)
    assert "TIMING FAILED, not timed: AssertionError: timed" in line(row)


def test_rates_are_fractions_of_the_machines_ceilings() -> None:
    row = run_entry(entry(), CEILINGS, 10, timer)
    assert row.gb_per_s == pytest.approx(1000)  # 20 MB in 20 us
    assert row.tflop_per_s == pytest.approx(80)
    assert row.fraction == pytest.approx(0.25)  # a quarter of the copy, a tenth of the product
    assert " 1980" in line(row) and row.verdict == ""


@pytest.mark.parametrize(
    ("bar", "ratio"),
    [
        (Bar(US, 40.0), 0.5),
        (Bar(OF_COPY, 0.5), 2.0),  # a quarter measured, half required
        (Bar(FA3, 1.25), 1.0),  # 20 us against 16
        (Bar(FA3, 1.15), 1.25 / 1.15),
    ],
)
def test_a_bar_is_met_at_a_ratio_of_one(bar: Bar, ratio: float) -> None:
    row = run_entry(entry(bar, rivals=[rival("theirs", 16.0)]), CEILINGS, 10, timer)
    assert row.bar_ratio == pytest.approx(ratio)
    assert row.verdict == ("met" if ratio <= 1 else "MISSED")
    assert line(row).endswith(f"{ratio:.2f} {row.verdict}")
    assert json.loads(json.dumps(row.as_json()))["judge_timing"]["sm_mhz"] == 1980


def test_without_flash_attention_3_its_bar_is_not_judged() -> None:
    row = run_entry(entry(Bar(FA3, 1.15)), CEILINGS, 10, timer)
    assert row.bar_ratio is None and row.verdict == "no FA3 here: not judged"
    assert line(row).endswith("bar 1.15 x FlashAttention 3: no FA3 here: not judged")
    wrong = rival("FA3", 1.0, check=fails)
    row = run_entry(entry(Bar(FA3, 1.15), rivals=[wrong]), CEILINGS, 10, timer)
    assert row.judge == "" and row.verdict == "FA3 failed here: not judged"
    assert row.rivals == [{"name": "FA3", "error": "AssertionError: rows differ"}]


def test_the_fastest_flash_attention_3_judges_the_bar() -> None:
    rivals = [rival("A3", 19.0), rival("B3", 18.0), rival("C3", 1.0, check=fails)]
    row = run_entry(entry(Bar(FA3, 1.15), rivals=rivals), CEILINGS, 10, timer)
    assert (row.judge, row.verdict) == ("B3", "met")
    assert "  1.11x B3 (18.0 us)" in line(row)
    assert [told["timing"].median for told in row.rivals if "timing" in told] == [19.0, 18.0]


def test_quick_has_exactly_the_cases_with_a_bar() -> None:
    quick, full = cases(QWEN3_8B, "cuda", quick=True), cases(QWEN3_8B, "cuda")
    assert [e.name for e in quick] == [e.name for e in full if e.bar]
    assert len({e.name for e in full}) == len(full)
    bars = {e.name: e.bar for e in quick}
    for top_k in (16, 32):
        assert bars[f"draft all R=1 N=64 K={top_k}"] == Bar(US, 60.0)
        assert bars[f"draft all R=1 N=256 K={top_k}"] == Bar(US, 150.0)
    assert bars["walk R=1 N=64"] == Bar(US, 15.0)
    assert bars["compact 9-token path, 36 layers, R=1"] == Bar(US, 15.0)
    assert bars["compact 9-token path, 36 layers, R=64"] == Bar(OF_COPY, 0.6)
    for context in (1024, 8192, 32768):
        for reqs in (1, 8):
            assert bars[f"attention R={reqs} N=64 context={context}"] == Bar(FA3, 1.15)
    assert len(bars) == 13


def test_a_graph_has_several_calls_over_different_data() -> None:
    assert min(QWEN3_8B.least_calls, QWEN3_8B.repeats) >= 5
    assert in_turn(["a", "b"], 5) == ["a", "b", "a", "b", "a"]  # type: ignore[list-item]
    assert len(in_turn([passes] * 7, 5)) == 7
    for made in cases(TINY, "cpu"):
        if made.op in ("attention", "compact"):
            case = made.make()
            assert len(set(case.calls)) >= 2 and case.memory.startswith("cold: ")


def test_a_report_is_complete_after_its_last_row_and_counts_verdicts(tmp_path: Path) -> None:
    report = Report(tmp_path / "out.json", CEILINGS, 2)
    for bar in (Bar(US, 30.0), Bar(FA3, 1.15)):
        report.add(run_entry(entry(bar), CEILINGS, 10, timer))
    assert json.loads((tmp_path / "out.json").read_text())["complete"] is True
    assert report.summary() == "bars: 1 met, 1 no FA3 here: not judged"
    report.add(Row("x", failed="check"))
    assert report.summary().endswith("; 1 FAILED")


@pytest.mark.slow
@pytest.mark.parametrize("entry", cases(TINY, "cpu"), ids=lambda entry: entry.name)
def test_every_case_passes_its_check(entry: Entry) -> None:
    entry.make().check()


def test_a_case_whose_result_is_wrong_fails_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    walk = next(entry for entry in cases(TINY, "cpu") if entry.op == "walk").make()
    walk.check()
    monkeypatch.setattr(accept_path, "triton", lambda *arguments: None)
    with pytest.raises(AssertionError, match="accept_path differs from its reference"):
        walk.check()


@pytest.mark.parametrize("arguments", [[], ["--quick", "--out", "x.json"]])
def test_without_a_gpu_it_times_nothing_and_gives_the_reason(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="no CUDA device, so there is no speed to measure"):
        main(arguments)
