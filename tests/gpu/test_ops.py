# SPDX-License-Identifier: Apache-2.0
"""The benchmark of ops: no timing without a check, and verdicts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from bastion_kernels import accept_path
from benchmarks.ops.attention import attention_case
from benchmarks.ops.sizes import SMALL
from benchmarks.ops.step import Step, compact_case, step_cases
from benchmarks.ops.timing import (
    FA3,
    OF_COPY,
    US,
    Bar,
    Call,
    Case,
    Entry,
    Rival,
    Timing,
    run_entry,
)

COPY = 4000.0  # GB/s


def passes() -> None:
    pass


def fails() -> None:
    raise AssertionError("rows\ndiffer")


def taking(microseconds: float) -> Call:
    """A call that `timer` reports as taking this long."""
    return lambda: microseconds


def timer(groups: Sequence[Sequence[Call]]) -> list[Timing]:
    times = [float(calls[0]()) for calls in groups]  # type: ignore[arg-type]
    return [Timing(t, t - 1, t + 1, t - 2, sm_mhz=1980) for t in times]


def never(groups: Sequence[Sequence[Call]]) -> list[Timing]:
    raise AssertionError("timed")


def entry(bar: Bar | None = None, check: Call = passes, rivals: Sequence[Rival] = ()) -> Entry:
    """A case of 20 us per call that moves 20 MB."""
    case = Case(check, [taking(20.0)], 20_000_000, rivals=rivals)
    return Entry("walk", "walk", lambda: case, bar)


def rival(name: str, microseconds: float, check: Call = passes) -> Rival:
    return Rival(name, lambda: ([taking(microseconds)], check))


def test_a_case_whose_check_fails_is_not_timed() -> None:
    row = run_entry(entry(check=fails), COPY, never)
    assert row.timing is None and row.failed == "check"
    assert "CHECK FAILED, not timed: AssertionError: rows differ" in row.line()


def test_a_case_that_cannot_be_built_or_timed_is_reported_and_stops_nothing() -> None:
    def explodes() -> Case:
        raise MemoryError("out of memory")

    row = run_entry(Entry("walk", "walk", explodes), COPY, never)
    assert "BUILD FAILED, not timed: MemoryError: out of memory" in row.line()
    assert (
        "TIMING FAILED, not timed: AssertionError: timed" in run_entry(entry(), COPY, never).line()
    )


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
    row = run_entry(entry(bar, rivals=[rival("theirs", 16.0)]), COPY, timer)
    assert row.bar_ratio == pytest.approx(ratio)
    assert row.verdict == ("met" if ratio <= 1 else "MISSED")
    assert row.line().endswith(f"{ratio:.2f} {row.verdict}")


def test_without_flash_attention_3_its_bar_is_not_judged() -> None:
    row = run_entry(entry(Bar(FA3, 1.15)), COPY, timer)
    assert row.bar_ratio is None and row.verdict == "no FA3 here: not judged"
    wrong = rival("FA3", 1.0, check=fails)
    row = run_entry(entry(Bar(FA3, 1.15), rivals=[wrong]), COPY, timer)
    assert row.judge == "" and row.verdict == "FA3 failed here: not judged"
    assert row.rivals == {"FA3": "AssertionError: rows differ"}


def test_the_fastest_flash_attention_3_judges_the_bar() -> None:
    rivals = [rival("A3", 19.0), rival("B3", 18.0), rival("C3", 1.0, check=fails)]
    row = run_entry(entry(Bar(FA3, 1.15), rivals=rivals), COPY, timer)
    assert (row.judge, row.verdict) == ("B3", "met")
    assert "1.11x (best 1.12x) B3: 18.0 us" in row.line()


def test_attention_and_compaction_read_other_data_in_each_call() -> None:
    for case in (attention_case(SMALL, 1, 9, 40, "cpu"), compact_case(SMALL, 3, "cpu")):
        case.check()
        assert len(set(case.calls)) >= 2


@pytest.mark.parametrize("entry", step_cases(SMALL, "cpu"), ids=lambda entry: entry.name)
def test_every_op_of_a_step_passes_its_check(entry: Entry) -> None:
    entry.make().check()


def test_a_case_whose_result_is_wrong_fails_its_check(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Step(SMALL, 1, 9, 4, "cpu")
    found.check("walk")
    monkeypatch.setattr(accept_path, "_loaded", lambda call: None)
    with pytest.raises(AssertionError, match="accept_path differs from its reference"):
        found.check("walk")
