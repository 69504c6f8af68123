# SPDX-License-Identifier: Apache-2.0
"""Ask one question after another until the call's time is over."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.questions import Question, ask
from benchmarks.harness.process import EngineError, EngineProcess
from benchmarks.ops.device import gpu_facts
from benchmarks.provenance import FOLDER, provenance, without_folders

ANSWERED, INTERRUPTED, FAILED, UNASKED = "answered", "interrupted", "failed", "not asked"
_IMPORTS = ["vllm.entrypoints.llm", "benchmarks.gpu.questions", "benchmarks.ops.device"]
# To end a process and to write what is left; characters kept of a failure, whose log is a file.
_RESERVE_S, _ERROR_CHARACTERS = 15.0, 3000


class Answers:
    """All calls and answers so far, in a file that is always valid JSON.

    `calls`: where, when and on what each call ran. `questions`: by name, `status`, `seconds`,
    `error` and `rows`; each row has its `part` and the number of its `call`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        found = json.loads(path.read_text()) if path.exists() else {"calls": [], "questions": {}}
        self.calls: list[dict[str, Any]] = found["calls"]
        self.questions: dict[str, dict[str, Any]] = found["questions"]

    def status(self, name: str) -> str:
        return str(self.questions.get(name, {}).get("status", UNASKED))

    def known(self, name: str) -> frozenset[str]:
        """The parts that it has told."""
        return frozenset(row["part"] for row in self.questions.get(name, {}).get("rows", ()))

    def begin(self, name: str) -> None:
        """A question is being asked; should everything be killed, it has been interrupted."""
        self.questions.setdefault(name, {"seconds": 0.0, "rows": []})
        self.update(name, INTERRUPTED, 0.0, "the whole call ended")

    def add(self, name: str, row: Any) -> None:
        """A part of its answer; engines tell of each response, too."""
        if isinstance(row, dict):
            self.questions[name]["rows"].append({**row, "call": len(self.calls) - 1})
            self.write()

    def update(self, name: str, status: str, seconds: float, error: str = "") -> None:
        entry = self.questions[name]
        entry |= {"status": status, "seconds": round(entry["seconds"] + seconds, 1), "error": error}
        self.write()

    def write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._path.with_suffix(".part")
        whole = {"calls": self.calls, "questions": self.questions}
        unfinished.write_text(json.dumps(whole) + "\n")
        os.replace(unfinished, self._path)


def order(questions: Sequence[Question], answers: Answers) -> list[Question]:
    """Those without an answer: first those that were never asked, last those that failed."""
    turns = (UNASKED, INTERRUPTED, FAILED)
    open_ = [one for one in questions if answers.status(one.name) != ANSWERED]
    return sorted(open_, key=lambda one: turns.index(answers.status(one.name)))


class Runner:
    """Asks questions within a call of some seconds, from now on; `logs`: a folder for them."""

    def __init__(self, answers: Answers, logs: Path, seconds: float, small: bool = False) -> None:
        self._answers, self._logs, self._small = answers, logs, small
        self._deadline = time.monotonic() + seconds
        logs.mkdir(parents=True, exist_ok=True)

    def run(self, questions: Sequence[Question]) -> None:
        """Ask what is open and fits into the time that is left."""
        if waiting := order(questions, self._answers):
            context, gpu = self._start()
            self._answers.calls.append({**gpu, **provenance(without_folders(sys.argv[1:]))})
            for question in waiting:
                if self._left() < (0 if self._small else question.needs_s / 2):
                    print(f"{question.name}: no time left, next call", flush=True)
                else:
                    self._ask(question, context)

    def _left(self) -> float:
        return self._deadline - time.monotonic() - _RESERVE_S

    def _start(self) -> tuple[Any, dict[str, Any]]:
        """How to start processes, and what the GPU is. Neither touches the GPU in this process.

        A question's process is forked from a server that has imported vLLM, if the GPU can be used
        in such a process; otherwise it imports vLLM itself.
        """
        forked = multiprocessing.get_context("forkserver")
        forked.set_forkserver_preload(_IMPORTS)
        errors = []
        for context in (forked, multiprocessing.get_context("spawn")):
            process = EngineProcess(self._logs / "gpu.log", context=context)
            try:
                process.call(gpu_facts)
                found = process.answer(timeout_s=self._left())
                if found["gpu"] is None:
                    raise SystemExit("benchmarks.gpu: no CUDA device here")
                return context, found
            except EngineError as error:  # CUDA cannot be used after a fork
                errors.append(error)
            finally:
                process.close()
        raise errors[-1]

    def _ask(self, question: Question, context: Any) -> None:
        answers, name, begin = self._answers, question.name, time.monotonic()
        limit = min(self._left(), question.limit_s if not self._small else float("inf"))
        print(f"{name}: {question.title} ({limit:.0f} s)", flush=True)
        known = answers.known(name)
        answers.begin(name)
        process = EngineProcess(self._logs / f"{name}-{len(answers.calls)}.log", context=context)
        status, text = ANSWERED, ""
        try:
            process.call(ask, question.ask, self._small, known)
            process.answer(timeout_s=limit, items=partial(answers.add, name))
        except EngineError as error:
            text = FOLDER.sub("", str(error))[-_ERROR_CHARACTERS:]
            status = INTERRUPTED if str(error).startswith("no answer after") else FAILED
        finally:
            process.close()
        answers.update(name, status, time.monotonic() - begin, text)
        print(f"{name}: {status} after {time.monotonic() - begin:.0f} s", flush=True)
