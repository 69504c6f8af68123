# SPDX-License-Identifier: Apache-2.0
"""The kernel benchmark: no timing without a check, and verdicts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from bastion_kernels import accept_path
from benchmarks.gpu.bench_kernels import line, main
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
    Timing,
    run_entry,
)
from benchmarks.gpu.shapes import TINY

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


def test_attention_and_compaction_read_other_data_in_each_call() -> None:
    for made in cases(TINY, "cpu"):
        if made.op in ("attention", "compact"):
            case = made.make()
            assert len(set(case.calls)) >= 2 and case.memory.startswith("cold: ")


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


def test_without_a_gpu_it_times_nothing_and_gives_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="no CUDA device, so there is no speed to measure"):
        main([])
