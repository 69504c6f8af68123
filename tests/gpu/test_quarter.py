# SPDX-License-Identifier: Apache-2.0
"""The quarter of an hour on a GPU without one: resuming, limits of time, its page, its kit."""

from __future__ import annotations

import json
import multiprocessing
import struct
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import ROOT
from benchmarks.gpu.quarter import main as command
from benchmarks.gpu.quarter import runner
from benchmarks.gpu.quarter.page import page
from benchmarks.gpu.quarter.questions import QUESTIONS, Question
from benchmarks.gpu.quarter.runner import Runner, order
from benchmarks.gpu.quarter.store import ANSWERED, FAILED, INTERRUPTED, UNASKED, Answers
from tests.gpu.asked import breaks, hangs_after_a_part, hears_nothing, tells

CALL = {"time": "2026", "command": "python", "commit": "abcdef123", "gpu": "a GPU", "vllm": "0.32"}


def question(function: Any, limit_s: float = 60.0, needs_s: float = 1.0) -> Question:
    name = function.__name__
    return Question(name, name, "nothing", f"{function.__module__}:{name}", limit_s, needs_s)


class Call(Runner):
    """A call without a GPU."""

    def _start(self) -> tuple[Any, dict[str, Any]]:
        return multiprocessing.get_context("spawn"), {"gpu": "none"}


def ask(folder: Path, *questions: Question, seconds: float = 60.0) -> Answers:
    """One call, as a new process would make it."""
    Call(Answers(folder / "quarter.json"), folder / "logs", seconds).run(questions)
    return Answers(folder / "quarter.json")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_RESERVE_S", 0.0)
    monkeypatch.setattr("benchmarks.harness.process._TRACE_S", 1.0)


def test_a_limit_keeps_what_was_told_and_the_next_call_asks_for_the_rest(tmp_path: Path) -> None:
    one = question(hangs_after_a_part, limit_s=5.0)
    answers = ask(tmp_path, one)
    assert answers.status(one.name) == INTERRUPTED and answers.known(one.name) == {"a"}
    error = answers.questions[one.name]["error"]
    assert "in hangs_after_a_part" in error and "KeyboardInterrupt" in error
    answers = ask(tmp_path, one)
    entry = answers.questions[one.name]
    assert entry["status"] == ANSWERED and not entry["error"]
    assert [(row["part"], row["call"]) for row in entry["rows"]] == [("a", 0), ("b", 1)]
    assert len(ask(tmp_path, one).calls) == 2  # nothing was left to ask


def test_a_process_that_hears_nothing_leaves_a_trace_too(tmp_path: Path) -> None:
    one = question(hears_nothing, limit_s=5.0)
    answers = ask(tmp_path, one)
    assert answers.status(one.name) == INTERRUPTED
    assert "hears_nothing" in answers.questions[one.name]["error"]


def test_a_failure_does_not_stop_the_others_and_names_no_folder(tmp_path: Path) -> None:
    answers = ask(tmp_path, question(breaks), question(tells))
    assert [answers.status(name) for name in ("breaks", "tells")] == [FAILED, ANSWERED]
    error = answers.questions["breaks"]["error"]
    assert "ValueError: no such kernel" in error and "/home" not in error


def test_nothing_is_begun_that_has_no_time(tmp_path: Path) -> None:
    slow = question(hangs_after_a_part)
    begin = time.monotonic()
    answers = ask(tmp_path, slow, question(tells, needs_s=200), seconds=6.0)
    assert time.monotonic() - begin < 25.0
    assert answers.status(slow.name) == INTERRUPTED
    assert answers.status("tells") == UNASKED


def test_a_call_that_is_killed_counts_as_an_interruption(tmp_path: Path) -> None:
    answers = Answers(tmp_path / "quarter.json")
    answers.begin_call(CALL)
    answers.begin("ops")
    answers.add("ops", {"part": "a"})
    again = Answers(tmp_path / "quarter.json")
    assert again.status("ops") == INTERRUPTED and again.known("ops") == {"a"}


def test_new_questions_come_before_interrupted_and_failed_ones(tmp_path: Path) -> None:
    answers = Answers(tmp_path / "quarter.json")
    states = {"tokens": FAILED, "adaptive": INTERRUPTED, "defaults": ANSWERED}
    for name, status in states.items():
        answers.begin(name)
        answers.end(name, status, 1.0)
    names = [one.name for one in order(QUESTIONS, answers)]
    assert names == ["experts", "host", "ops", "drafter", "adaptive", "tokens"]


def block(mode: str, seconds: float, **fields: Any) -> dict[str, Any]:
    counts = {"steps": 10, "nodes": 40, "forwards": 20, "emitted": 60, "equal": 3}
    return {"mode": mode, "seconds": seconds, "timed": [[1, 17, 1, 4, 6.0, 5.0]]} | counts | fields


def test_the_page_is_made_of_the_file_alone(tmp_path: Path) -> None:
    answers = Answers(tmp_path / "quarter.json")
    answers.begin_call(CALL)
    rows: dict[str, list[dict[str, Any]]] = {
        "tokens": [
            {"part": "test_a", "outcome": "passed", "text": ""},
            {"part": "test_b", "outcome": "failed", "text": "trace\nAssertionError: other tokens"},
        ],
        "adaptive": [
            {"part": "starts", "plain": 30.0},
            {
                "part": "1 at a time, T=0",
                "blocks": [
                    *(block("plain", 4.0), block("16", 2.0), block("adaptive", 1.6)),
                    *(block("adaptive", 1.8), block("16", 1.8), block("plain", 3.6)),
                ],
            },
        ],
        "defaults": [
            {"part": "start", "peak_gib": 12.0},
            {"part": "33 requests", "blocks": [block("never", 0.5)]},
        ],
        "ops": [
            {"part": "ceilings", "copy": 3000.0},
            {
                "part": "plan, 16 requests",
                "timing": {"median": 12.0},
                "judge_timing": {"median": 10.0},
                "judge": "FA3",
            },
            {"part": "top-p", "failed": "check", "error": "AssertionError: x"},
        ],
        "drafter": [
            {
                "part": "1 at a time",
                "fp8": {"tau": 3.5, "draft_ms": 0.5, "step_ms": 5.0, "ms_a_token": 1.25},
            }
        ],
    }
    for name, own in rows.items():
        answers.begin(name)
        for row in own:
            answers.add(name, row)
        answers.end(name, ANSWERED, 12.0)
    answers.end("ops", INTERRUPTED, 3.0, "no answer after 3 s\nKeyboardInterrupt")
    text = page(Answers(tmp_path / "quarter.json"))
    assert "1 of 2 tests passed." in text and "test_b: failed AssertionError: other tokens" in text
    # 4 / 1.6 and 3.6 / 1.8; over N = 16: 2 / 1.6 and 1.8 / 1.8
    assert "| 1 at a time, T=0 | adaptive | 2.25x | 3 | 2 | 170 | 3 | 1.125 of N = 16 |" in text
    assert "| 1 | 17 | trees | 24 | 6 | 5 | 1.2 |" in text
    assert "Start: peak_gib 12." in text and "| 33 requests | no drafts | 10 | 50 |" in text
    assert "| plan, 16 requests | 12 | 10 | 1.2 | FA3 |" in text
    assert "check failed: AssertionError: x" in text and "Status: interrupted, 15 s." in text
    assert "| 1 at a time | fp8 | 3.5 | 0.5 | 5 | 1.25 |" in text
    assert text.count("Not asked yet.") == 2


def test_the_command_lists_and_writes_the_page_without_a_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--list", "--out", str(tmp_path)]) == 0
    listed = capsys.readouterr().out
    assert all(f"{one.name:9} " in listed and one.decides in listed for one in QUESTIONS)
    assert command.main(["--page", "--out", str(tmp_path)]) == 1  # no answers yet
    assert (tmp_path / "quarter.md").read_text().count("Not asked yet.") == len(QUESTIONS)


def _fat_binary(*entries: tuple[int, int, bytes]) -> bytes:
    body = b""
    for kind, architecture, code in entries:
        head = struct.pack("<HHIQIIHHI", kind, 0x101, 64, len(code), 0, 0, 0, 0, architecture)
        body += head.ljust(64, b"\0") + code
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_the_kit_keeps_hoppers_code_and_the_heads_that_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "gpu" / "quarter" / "tools"))
    import shrink

    def flash(dim: int, dtype: str) -> bytes:
        return f"...ELi{dim}ENS_10{dtype}EfNS_4arch4Sm90ELb0...".encode()

    kept = [
        (2, 90, b"any code"),
        (2, 90, flash(128, "bfloat16_t")),
        (2, 90, flash(64, "bfloat16_t")),
    ]
    gone = [
        *((2, 80, b"ampere"), (1, 90, b"ptx"), (2, 90, flash(192, "bfloat16_t"))),
        *((2, 90, flash(256, "float_e4m3_t")), (2, 90, flash(128, "half_t"))),
    ]
    library = b"head" + _fat_binary(*kept, *gone) + b"text" + _fat_binary(gone[0])
    made, cleared = shrink.shrink(library)
    assert len(made) == len(library)
    assert cleared == sum(len(code) for _, _, code in (*gone, gone[0]))
    assert all(made.count(code) == library.count(code) for _, _, code in kept)
    assert not any(code in made for _, _, code in gone)
    sys.modules.pop("shrink")


def test_results_of_a_call_are_valid_json_at_any_time(tmp_path: Path) -> None:
    answers = Answers(tmp_path / "quarter.json")
    answers.begin_call(CALL)
    answers.begin("ops")
    for number in range(3):
        answers.add("ops", {"part": str(number)})
        assert len(json.loads((tmp_path / "quarter.json").read_text())["questions"]["ops"]["rows"])
