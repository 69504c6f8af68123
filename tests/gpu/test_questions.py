# SPDX-License-Identifier: Apache-2.0
"""The quarter of an hour on a GPU without one: resuming, limits of time, traces, and the page."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.e2e.store import Row, Store
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import trace
from benchmarks.gpu.__main__ import ANSWERED, FAILED, INTERRUPTED, order, page, run, statuses
from benchmarks.gpu.questions import QUESTIONS, Question
from tests.gpu.asked import breaks, hangs_once, hears_nothing, tells

CALL = {"time": "2026", "command": "python", "commit": "abcdef123", "gpu": "a GPU", "vllm": "0.32"}


def question(
    function: Callable[[Path, bool], None], limit_s: float = 60.0, needs_s: float = 1.0
) -> Question:
    name = function.__name__
    return Question(name, name, "nothing", needs_s, limit_s, function)


def ask(folder: Path, *questions: Question, seconds: float = 60.0) -> dict[str, Row]:
    """One call, as a new process would make it, and the last row of each question."""
    store = Store(folder / "answers.jsonl", {}, {"provenance": CALL})
    run(questions, store, folder, seconds)
    return {row["question"]: row for row in store.of_kind("asked")}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_RESERVE_S", 0.0)
    monkeypatch.setattr("benchmarks.harness.process._TRACE_S", 1.0)


@pytest.mark.slow
def test_an_interrupted_question_leaves_a_trace_and_is_asked_again(tmp_path: Path) -> None:
    one = question(hangs_once, limit_s=5.0)
    row = ask(tmp_path, one)["hangs_once"]
    assert row["status"] == INTERRUPTED
    assert "in hangs_once" in row["text"] and "KeyboardInterrupt" in row["text"]
    assert ask(tmp_path, one)["hangs_once"]["status"] == ANSWERED
    (tmp_path / "hung").unlink()
    assert ask(tmp_path, one)["hangs_once"]["status"] == ANSWERED, "nothing was left to ask"


@pytest.mark.slow
def test_a_process_that_hears_nothing_leaves_a_trace_too(tmp_path: Path) -> None:
    row = ask(tmp_path, question(hears_nothing, limit_s=5.0))["hears_nothing"]
    assert row["status"] == INTERRUPTED and "hears_nothing" in row["text"]


def test_a_failure_does_not_stop_the_others_and_names_no_folder(tmp_path: Path) -> None:
    questions = question(breaks), question(tells)
    rows = ask(tmp_path, *questions)
    assert [row["status"] for row in rows.values()] == [FAILED, ANSWERED]
    text = rows["breaks"]["text"]
    assert "ValueError: no such kernel" in text and "/home" not in text
    shown = page(
        Store(tmp_path / "answers.jsonl", {}, {"provenance": CALL}).rows, tmp_path, questions
    )
    assert "It decides nothing. Answered.\n\n```\nthe answer\n```" in shown


def test_nothing_is_begun_that_has_no_time(tmp_path: Path) -> None:
    begin = time.monotonic()
    rows = ask(tmp_path, question(hangs_once), question(tells, needs_s=200), seconds=2.0)
    assert time.monotonic() - begin < 25.0
    assert rows["hangs_once"]["status"] == INTERRUPTED and "tells" not in rows


def test_new_questions_come_before_interrupted_and_failed_ones() -> None:
    known = {"tokens": FAILED, "trace": INTERRUPTED, "ops": ANSWERED}
    rows = [{"kind": "asked", "question": name, "status": INTERRUPTED} for name in known]
    rows += [{"kind": "asked", "question": n, "status": status} for n, status in known.items()]
    assert statuses(rows) == known, "a call that was killed has the first row alone"
    assert [one.name for one in order(QUESTIONS, known)] == ["real", "trace", "tokens"]


def test_gaps_of_the_device_belong_to_the_innermost_part_of_the_host_that_runs() -> None:
    host = [("schedule", 0, 10), ("execute_model", 10, 100), ("prepare_inputs", 20, 50)]
    host += [("cudaLaunchKernel", 12, 13), ("cudaGraphLaunch", 60, 61)]
    device = [("kernel b", 30, 35), ("kernel a", 5, 20), ("copy", 15, 25), ("kernel b", 70, 105)]
    events = [trace.Event(*one, False) for one in host]
    events += [trace.Event(*one, True) for one in device]
    found = trace.summary(events, steps=2)
    assert found["busy"] == pytest.approx(60 / 100)
    assert found["gaps"] == pytest.approx({"execute_model": 17.5e-6, "prepare_inputs": 2.5e-6})
    kernels = {"kernel b": 20e-6, "kernel a": 7.5e-6, "copy": 5e-6}
    assert found["kernels"] == pytest.approx(kernels)
    assert (found["launches"], found["waits"]) == (1.0, 0.0)
    assert trace.summary([], steps=1)["busy"] is None


def test_a_trace_that_lacks_nothing_starts_no_engine_and_is_on_the_page(tmp_path: Path) -> None:
    calls = Store(tmp_path / "answers.jsonl", {}, {"provenance": CALL})
    store = Store(tmp_path / "trace.jsonl", {}, {})
    store.append({"kind": "start", "method": "plain", "seconds": 61.25})
    for mode in trace.MODES:
        for n in (1, 2):
            for more in ("", ", prompts join"):
                found = {"ms": 4.0, "busy": None, "gaps": {"schedule": 1.0}}
                store.append({"kind": "part", "part": f"{mode}, {n} requests{more}", **found})
    trace.answer(tmp_path, small=True)
    text = page(calls.rows, tmp_path)
    assert "| plain, 2 requests, prompts join | 4 | None | schedule 1 |" in text
    assert "Starts: plain 61.2 s." in text and "a GPU, driver None, vllm 0.32" in text
    assert text.count("Not asked.") == len(QUESTIONS)
