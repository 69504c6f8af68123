# SPDX-License-Identifier: Apache-2.0
"""The quarter of an hour on a GPU without one: resuming, limits of time, traces, and the page."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import runner
from benchmarks.gpu.__main__ import page
from benchmarks.gpu.questions import QUESTIONS, Question
from benchmarks.gpu.runner import ANSWERED, FAILED, INTERRUPTED, UNASKED, Answers, Runner, order
from benchmarks.gpu.trace import Event, summary
from tests.gpu.asked import breaks, hangs_after_a_part, hears_nothing, tells

CALL = {"time": "2026", "command": "python", "commit": "abcdef123", "gpu": "a GPU", "vllm": "0.32"}


def question(function: Any, limit_s: float = 60.0, needs_s: float = 1.0) -> Question:
    name = function.__name__
    return Question(name, name, "nothing", needs_s, limit_s, function)


class Call(Runner):
    """A call without a GPU."""

    def _start(self) -> tuple[Any, dict[str, Any]]:
        return multiprocessing.get_context("spawn"), {"gpu": "none"}


def ask(folder: Path, *questions: Question, seconds: float = 60.0) -> Answers:
    """One call, as a new process would make it."""
    Call(Answers(folder / "answers.json"), folder / "logs", seconds).run(questions)
    return Answers(folder / "answers.json")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_RESERVE_S", 0.0)
    monkeypatch.setattr("benchmarks.harness.process._TRACE_S", 1.0)


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
    answers = Answers(tmp_path / "answers.json")
    answers.calls.append(CALL)
    answers.begin("ops")
    answers.add("ops", {"part": "a"})
    again = Answers(tmp_path / "answers.json")
    assert again.status("ops") == INTERRUPTED and again.known("ops") == {"a"}


def test_new_questions_come_before_interrupted_and_failed_ones(tmp_path: Path) -> None:
    answers = Answers(tmp_path / "answers.json")
    for name, status in {"tokens": FAILED, "trace": INTERRUPTED, "ops": ANSWERED}.items():
        answers.begin(name)
        answers.update(name, status, 1.0)
    names = [one.name for one in order(QUESTIONS, answers)]
    assert names == ["real", "adaptive", "experts", "trace", "tokens"]


def test_gaps_of_the_device_belong_to_the_innermost_part_of_the_host_that_runs() -> None:
    host = [("schedule", 0, 10), ("execute_model", 10, 100), ("prepare_inputs", 20, 50)]
    host += [("cudaLaunchKernel", 12, 13), ("cudaGraphLaunch", 60, 61)]
    device = [("kernel b", 30, 35), ("kernel a", 5, 20), ("copy", 15, 25), ("kernel b", 70, 105)]
    events = [Event(*one, False) for one in host] + [Event(*one, True) for one in device]
    found = summary(events, steps=2)
    assert found["busy"] == pytest.approx(60 / 100)
    assert found["gaps"] == pytest.approx({"execute_model": 17.5e-6, "prepare_inputs": 2.5e-6})
    kernels = {"kernel b": 20e-6, "kernel a": 7.5e-6, "copy": 5e-6}
    assert found["kernels"] == pytest.approx(kernels)
    assert (found["launches"], found["waits"]) == (1.0, 0.0)
    assert summary([], steps=1)["busy"] is None


def test_the_page_has_a_table_of_each_kind_of_row(tmp_path: Path) -> None:
    answers = Answers(tmp_path / "answers.json")
    answers.calls.append(CALL)
    sums = dict.fromkeys(("forwards", "verified", "steps", "step_ms", "draft_ms", "tokens"), 10)
    block = {"mode": "plain", "seconds": 2.0, "replies": 3, "equal": 3, "emitted": 10, **sums}
    faster = {**block, "mode": "bastion", "seconds": 1.0, "emitted": 25}
    rows = {
        "trace": {"part": "plain, 1 requests", "ms": 4.0, "busy": 0.5, "gaps": {"schedule": 1.0}},
        "real": {"part": "1 at a time, T=0", "blocks": [block, faster]},
        "tokens": {"part": "a test", "outcome": "failed", "text": "E  assert"},
        "ops": {"part": "walk", "op": "walk", "timing": {"median": 1.5}, "verdict": "met"},
    }
    for name, row in rows.items():
        answers.begin(name)
        answers.add(name, row)
        answers.update(name, ANSWERED, 1.0)
    text = page(answers)
    for line in (
        "| plain, 1 requests | 4 | 0.5 | schedule 1 |",
        "| 1 at a time, T=0 | bastion | 2 | 2.5 | 1 | 1 | 1 | 100 | 3 of 3 |",
        "| a test | failed | E assert |",
        "| walk | 1.5 |  | met |",
    ):
        assert line in text, text
