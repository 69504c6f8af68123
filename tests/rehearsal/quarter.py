# SPDX-License-Identifier: Apache-2.0
"""`make rehearse ARGS=quarter`: the questions of `benchmarks.gpu`, from start to end.

The first call gets too little time for all of them, so a question is interrupted; the second one
goes on and must end with an answer to each. Times are made up, numbers are the emulation's.
"""

from __future__ import annotations

import json
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
    _compute_after_start(emulation)
    _report_missing(emulation)
    from benchmarks.gpu.__main__ import main

    problems = []
    folder = ROOT / "build" / "gpu"  # git-ignored
    shutil.rmtree(folder, ignore_errors=True)
    for seconds in (_FIRST_S, _SECOND_S):
        begin = time.perf_counter()
        status = main(["--small", "--seconds", str(seconds), "--out", str(folder), *arguments])
        print(f"call: {time.perf_counter() - begin:.0f} s, status {status}", flush=True)
    answers = json.loads((folder / "answers.json").read_text())["questions"]
    for name, entry in answers.items():
        if entry["status"] != "answered":
            problems.append(f"{name}: {entry['status']}: {entry['error']}")
        problems += [
            f"{name}: {row['part']}: {row.get('error') or row.get('text')}"
            for row in entry["rows"]
            if row.get("failed") or row.get("outcome") == "failed"
        ]
    for path in (folder / "logs").glob("*.log"):
        text = path.read_text(errors="replace")
        problems += [f"{path.stem}: {line}" for line in text.splitlines() if "FAULT" in line]
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


def _report_missing(emulation: Any) -> None:
    """A question fails where the emulation has no numbers for a kernel."""
    from benchmarks.gpu import questions

    ask = questions.ask

    @wraps(ask)  # a process finds it by its name
    def checked(*args: Any) -> None:
        ask(*args)
        if emulation.missing or emulation.errors:
            raise RuntimeError(f"no numbers for {dict(emulation.missing)}: {emulation.errors}")

    questions.ask = checked


def _compute_after_start(emulation: Any) -> None:
    """Numbers are computed again once an engine has started, see `Emulation`."""
    from vllm import LLM

    start = LLM.__init__

    def started(llm: Any, *args: Any, **kwargs: Any) -> None:
        emulation.running = True
        start(llm, *args, **kwargs)
        emulation.running = True

    LLM.__init__ = started
