# SPDX-License-Identifier: Apache-2.0
"""Ask one question after another until the call's time is over.

A question's process is forked from a server that has imported vLLM, if the GPU can be used in such
a process; otherwise it imports vLLM itself. Each engine is built in its question's process.
"""

from __future__ import annotations

import multiprocessing
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.device import gpu_facts
from benchmarks.gpu.quarter.job import ask
from benchmarks.gpu.quarter.questions import Question
from benchmarks.gpu.quarter.store import ANSWERED, FAILED, INTERRUPTED, UNASKED, Answers
from benchmarks.harness.process import EngineError, EngineProcess
from benchmarks.provenance import FOLDER, provenance, without_folders

_IMPORTS = ["vllm.entrypoints.llm", "benchmarks.gpu.quarter.job", "benchmarks.gpu.device"]
# Kept of a failure, whose whole log is a file.
_ERROR_CHARACTERS = 3000
# To end a process, and to write what is left.
_RESERVE_S = 15.0


def order(questions: Sequence[Question], answers: Answers) -> list[Question]:
    """Those without an answer: first those that were never asked, last those that failed."""
    turns = (UNASKED, INTERRUPTED, FAILED)
    open_ = [one for one in questions if answers.status(one.name) != ANSWERED]
    return sorted(open_, key=lambda one: turns.index(answers.status(one.name)))


def fits(question: Question, left_s: float, small: bool) -> bool:
    """Whether to begin a question; the simulated GPU takes as long as it takes."""
    return left_s > (0 if small else question.needs_s / 2)


class Runner:
    """Asks questions within a call.

    Args:
        seconds: of the whole call, from now on.
        logs: folder for a log of each question.
        small: see `Job`.
        clock: for tests.
    """

    def __init__(
        self,
        answers: Answers,
        logs: Path,
        seconds: float,
        small: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._answers, self._logs, self._small, self._clock = answers, logs, small, clock
        self._deadline = clock() + seconds
        self._pair: EngineProcess | None = None
        logs.mkdir(parents=True, exist_ok=True)

    def run(self, questions: Sequence[Question]) -> None:
        """Ask what is open and fits into the time that is left."""
        waiting = order(questions, self._answers)
        if not waiting:
            return
        context, gpu = self._start()
        self._answers.begin_call({**gpu, **provenance(without_folders(sys.argv[1:]))})
        try:
            self._write_pair(waiting)
            for question in waiting:
                if question.timed:
                    self._wait_for_pair()
                if not fits(question, self._left(), self._small):
                    print(f"{question.name}: no time left, next call", flush=True)
                    continue
                self._ask(question, context)
        finally:
            if self._pair is not None:
                self._pair.close()

    def _left(self) -> float:
        return self._deadline - self._clock() - _RESERVE_S

    def _start(self) -> tuple[Any, dict[str, Any]]:
        """How to start processes, and what the GPU is. Neither touches the GPU in this process."""
        forked = multiprocessing.get_context("forkserver")
        forked.set_forkserver_preload(_IMPORTS)
        errors = []
        for context in (forked, multiprocessing.get_context("spawn")):
            process = EngineProcess(self._logs / "gpu.log", context=context)
            try:
                process.call(gpu_facts)
                found = process.answer(timeout_s=self._left())
                if found["gpu"] is None:
                    raise SystemExit("quarter: no CUDA device here")
                return context, found
            except EngineError as error:  # CUDA cannot be used after a fork
                errors.append(error)
            finally:
                process.close()
        raise errors[-1]

    def _write_pair(self, waiting: Iterable[Question]) -> None:
        """Begin to write the pair that a question reads, beside one that is not timed."""
        names = {one.pair for one in waiting if one.pair is not None}
        if names and not self._small:
            self._pair = EngineProcess(self._logs / "pair.log")
            self._pair.call(write_pairs, sorted(names))

    def _wait_for_pair(self) -> None:
        if self._pair is None:
            return
        try:
            self._pair.answer(timeout_s=max(1.0, self._left()))
        except EngineError as error:  # those that read it will say so
            print(f"pair: {error}", flush=True)
        self._pair.close()
        self._pair = None

    def _ask(self, question: Question, context: Any) -> None:
        answers, name = self._answers, question.name
        known = answers.known(name)
        limit = min(self._left(), question.limit_s if not self._small else float("inf"))
        print(f"{name}: {question.title} ({limit:.0f} s)", flush=True)
        answers.begin(name)
        begin = self._clock()
        log = self._logs / f"{name}.log"
        if log.exists():
            shutil.copy(log, log.with_suffix(".before.log"))
        process = EngineProcess(log, context=context)
        status, text = ANSWERED, ""

        def note(item: Any) -> None:
            if isinstance(item, dict):  # engines tell of each response, too
                answers.add(name, item)

        try:
            process.call(ask, question.function, self._small, known)
            process.answer(timeout_s=limit, items=note)
        except EngineError as error:
            text = FOLDER.sub("", str(error))[-_ERROR_CHARACTERS:]
            status = INTERRUPTED if str(error).startswith("no answer after") else FAILED
        finally:
            process.close()
        seconds = self._clock() - begin
        answers.end(name, status, seconds, text)
        print(f"{name}: {status} after {seconds:.0f} s", flush=True)


def write_pairs(names: Sequence[str]) -> None:
    """Write pairs of `benchmarks.widen` to the cache, in a process that leaves the GPU alone."""
    from benchmarks.widen import pair_of

    for name in names:
        pair_of(name)
