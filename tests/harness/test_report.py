# SPDX-License-Identifier: Apache-2.0
"""The results file and the pages of `benchmarks.e2e`, over rounds made up here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.e2e.methods import PLAIN
from benchmarks.e2e.report import numbers, page, ratio, same
from benchmarks.e2e.rounds import short_reason, summary
from benchmarks.e2e.store import Round, Store, StoreError, read_rows
from benchmarks.harness.driver import Response

SETTINGS = {"target": "t", "tokens": 8, "seed": 0, "alive": 3, "dtype": "float32"}
SOURCE = {"device": "CPU", "command": "python x", "commit": "abcdef0123"}
HEADER = {"name": "tiny", "provenance": SOURCE}


def row(method: str, number: int = 0, ms: float = 10.0, **fields: Any) -> dict[str, Any]:
    """101 tokens at `ms` each; 25 forwards of 4 tokens and 10 nodes."""
    own = {
        "kind": "round",
        "method": method,
        "group": "g",
        **Round(0.0, 1, "a", 0, number)._asdict(),
    }
    own |= {"responses": 1, "tokens": 101, "seconds": 101 * ms / 1e3, "token_ms": ms}
    own |= {"ttft_ms": 500.0, "emitted": 100, "forwards": 25, "verified": 250, "steps": 20}
    return own | {"step_ms": 200.0, "verify_ms": 120.0, "draft_ms": 50.0} | fields


def test_the_ratio_is_of_mean_times_per_token() -> None:
    plain = [row(PLAIN, i, ms) for i, ms in enumerate((10.0, 30.0))]
    found = ratio(plain, [row("x", i, 5.0) for i in range(2)])
    assert found is not None and found.mean == pytest.approx(20.0 / 5.0)
    # Resamples of two rounds: both the first, both the second, or one of each.
    assert (found.low, found.high) == (pytest.approx(2.0), pytest.approx(6.0))
    assert found.rounds == [pytest.approx(2.0), pytest.approx(6.0)]
    assert ratio(plain, [row("x", 7)]) is None


def test_a_round_is_compared_with_its_neighbour_in_time() -> None:
    # The machine is three times as slow in the second group, and plain decoding ran there again.
    plain = [row(PLAIN, ms=10.0), row(PLAIN, ms=30.0, group="h")]
    for own in (row("x", ms=5.0), row("x", ms=15.0, group="h"), row("x", ms=5.0, group="other")):
        found = ratio(plain, [own])
        assert found is not None and found.mean == pytest.approx(2.0)


def test_several_at_a_time_are_compared_by_all_tokens_over_all_time() -> None:
    load = {"concurrency": 4}
    found = ratio([row(PLAIN, **load)], [row("x", ms=99.0, seconds=0.505, **load)])
    assert found is not None and found.mean == pytest.approx(2.0)


def test_numbers_are_sums_over_sums() -> None:
    found = numbers([row("x"), row("x", 1, emitted=20, forwards=20, verified=0)])
    assert found["tau"] == 120 / 45 and found["N"] == 250 / 45
    assert (found["T_verify"], found["T_draft"]) == (6.0, 2.5)
    assert found["T_aux"] == pytest.approx(1.5) and found["TTFT ms"] == 500


def test_a_summary_has_the_papers_time_per_token() -> None:
    first = Response("a", [1] * 11, 3, 0.0, 0.5, 1.5, 10, 5, 20, busy_s=1.5, busy_tokens=11)
    second = Response("b", [1] * 21, 3, 1.0, 1.25, 2.25, 20, 5, 20, busy_s=2.0, busy_tokens=16)
    found = summary([first, second])
    assert found["token_ms"] == pytest.approx((100 + 50) / 2) and found["seconds"] == 2.0
    assert found["tokens"] == 27 and found["emitted"] == 30 and found["ttft_ms"] == 375


def test_replies_that_differ_are_counted_and_near_ties_shown() -> None:
    compared = {"compared_with": PLAIN, "responses": 3}
    rows = [row("x", differs={}, **compared), row("x", 1, differs={"p": [3, 7]}, **compared)]
    assert same(rows, set()) == "5/6"
    assert same(rows, {("x", Round.of(rows[1]), "p")}) == "5/6, 1 near-ties"
    assert same([row(PLAIN)], set()) == ""


def test_a_page_has_both_checkouts_by_start_and_gaps() -> None:
    rows = [{"kind": "run", "settings": SETTINGS, **HEADER}]
    for number, theirs in enumerate((5.0, 4.5)):
        for method, ms in ((PLAIN, 10.0), ("bastion", 4.0), ("bastion @ abc", theirs)):
            rows.append(row(method, number, ms, group=str(number)))
    rows.append(
        {"kind": "gap", "method": "suffix 32", "concurrency": 1, "reason": "no such module"}
    )
    text = page(rows)
    assert "| bastion | 2.500x [2.500, 2.500] | 2.500x |" in text
    assert "| bastion | abc | 1.186x | 1.250, 1.125 | 2 |" in text
    assert "- suffix 32, concurrency 1: no such module" in text and "engines in turn" in text


def test_a_file_survives_a_kill_and_refuses_other_settings(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "a.jsonl"
    Store(path, SETTINGS, HEADER).append(row(PLAIN))
    assert [one["kind"] for one in read_rows(path)] == ["run", "round"]
    with path.open("a") as file:
        file.write('{"kind": "round", "method": "pl')
    assert len(read_rows(path)) == 2
    Store(path, SETTINGS | {"alive": 2}, HEADER).append(row(PLAIN, 1))
    assert [one["kind"] for one in read_rows(path)] == ["run", "round"] * 2
    with pytest.raises(StoreError, match=r"made with tokens=8, not 9: choose another --out"):
        Store(path, SETTINGS | {"tokens": 9}, HEADER)
    path.write_text("{}\n")
    with pytest.raises(StoreError, match="no results file"):
        read_rows(path)


def test_the_reason_of_a_gap_has_no_folders() -> None:
    text = "x died\nTraceback\n(Engine) ValueError: no file /a/b/c.json\n  more"
    assert short_reason(text) == "ValueError: no file c.json"
