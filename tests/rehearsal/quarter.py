# SPDX-License-Identifier: Apache-2.0
"""`make rehearse ARGS=quarter`: the questions of `benchmarks.gpu`, from start to end.

The first call gets too little time for all of them, so a question is interrupted; the second one
goes on and must end with an answer to each. Times are made up, numbers are the emulation's.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import time
from functools import wraps
from typing import Any

from tests.rehearsal.cases import ROOT

# Long enough for the first question, too short for the second.
_FIRST_S, _SECOND_S = 150.0, 3600.0


def rehearse(arguments: list[str]) -> int:
    """Ask with `--small`, twice; 0 if every question got its answer and nothing was refused."""
    from tests.rehearsal.device import FakeDriver
    from tests.rehearsal.emulation import Emulation

    driver = FakeDriver()
    emulation = Emulation(driver)
    emulation.install()
    _fork_all(emulation)
    _adapt_starts(emulation)
    _check_engines(driver, emulation)
    from benchmarks.e2e.store import read_rows
    from benchmarks.gpu.__main__ import ANSWERED, main, statuses

    problems = []
    folder = ROOT / "build" / "gpu"  # git-ignored
    shutil.rmtree(folder, ignore_errors=True)
    for seconds in (_FIRST_S, _SECOND_S):
        begin = time.perf_counter()
        status = main(["--small", "--seconds", str(seconds), "--out", str(folder), *arguments])
        print(f"call: {time.perf_counter() - begin:.0f} s, status {status}", flush=True)
    rows = read_rows(folder / "answers.jsonl")
    last = {row["question"]: row for row in rows if row["kind"] == "asked"}
    for name, found in statuses(rows).items():
        if found != ANSWERED:
            problems.append(f"{name}: {found}: {last[name]['text']}")
    if (real := folder / "real.jsonl").exists():
        problems += [f"real: {row}" for row in read_rows(real) if row["kind"] == "gap"]
    for problem in problems:
        print(f"FAILED {problem}")
    return int(bool(status or problems))


def _fork_all(emulation: Any) -> None:
    """Every process of the quarter is a fork of this one, which has the emulation."""
    import torch
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    from tests.rehearsal.emulation import _Dispatch

    def enter() -> None:
        # PyTorch keeps its modes by thread, and the tests fork from threads of a pool.
        if _get_current_dispatch_mode() is None:
            _Dispatch(emulation).__enter__()

    os.register_at_fork(after_in_child=enter)
    forked, get = multiprocessing.get_context("fork"), multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: forked if method else get()  # type: ignore
    # Some import has initialised CUDA, but the fake driver's state survives a fork.
    torch.cuda._is_in_bad_fork = lambda: False


def _check_engines(driver: Any, emulation: Any) -> None:
    """A question or an engine's round fails on a fault, and on a kernel without numbers."""
    from benchmarks.gpu import __main__ as gpu
    from benchmarks.gpu import questions
    from benchmarks.harness.driver import Driver

    def checked(call: Any) -> Any:
        @wraps(call)  # a process finds it by its name
        def check(*args: Any) -> Any:
            found = call(*args)
            if wrong := [*driver.faults(), *emulation.errors, *emulation.missing]:
                raise RuntimeError(f"faults, errors, or kernels without numbers: {wrong}")
            return found

        return check

    Driver.drive = checked(Driver.drive)
    gpu.ask = questions.ask = checked(questions.ask)


def _adapt_starts(emulation: Any) -> None:
    """Engines start without torch.compile, whose code the simulated GPU cannot run.

    Numbers are computed again once an engine has started, see `Emulation`.
    """
    from vllm import LLM

    start = LLM.__init__

    def started(llm: Any, *args: Any, compilation_config: Any = None, **kwargs: Any) -> None:
        emulation.running = True
        start(llm, *args, compilation_config={**(compilation_config or {}), "mode": 0}, **kwargs)
        emulation.running = True

    LLM.__init__ = started
