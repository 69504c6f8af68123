# SPDX-License-Identifier: Apache-2.0
"""The quarter of an hour on a GPU without one: resuming, and limits of time."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

from benchmarks.gpu.quarter import runner
from benchmarks.gpu.quarter.questions import QUESTIONS, Question
from benchmarks.gpu.quarter.runner import Runner, order
from benchmarks.gpu.quarter.store import ANSWERED, FAILED, INTERRUPTED, UNASKED, Answers
from tests.gpu.asked import breaks, hangs_after_a_part, hears_nothing, tells

CALL = {"time": "2026", "command": "python", "commit": "abcdef123", "gpu": "a GPU", "vllm": "0.32"}


class Asked(Question):
    """A question of `asked.py`."""

    @property
    def function(self) -> str:
        return f"tests.gpu.asked:{self.name}"


def question(function: Any, limit_s: float = 60.0, needs_s: float = 1.0) -> Question:
    name = function.__name__
    return Asked(name, name, "nothing", limit_s, needs_s)


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


def test_every_question_can_be_asked() -> None:
    for one in QUESTIONS:
        assert callable(resolve_name(one.function))


@pytest.mark.slow
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


@pytest.mark.slow
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
    assert names == ["real", "experts", "host", "ops", "drafter", "adaptive", "tokens"]
