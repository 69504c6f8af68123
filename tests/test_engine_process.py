# SPDX-License-Identifier: Apache-2.0
"""Engine processes that are forked: locks and streams that they take over from their parent."""

from __future__ import annotations

import multiprocessing
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.harness.process import EngineError, EngineProcess

FORK = multiprocessing.get_context("fork")


def _pid_of_another(log: str) -> int:
    """Start a process in a thread, as the runner of the end-to-end tests does."""

    def start() -> int:
        process = EngineProcess(Path(log), context=FORK)
        process.call(os.getpid)
        pid = int(process.answer(timeout_s=20))
        process.close()
        return pid

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(start).result()


def _complain() -> None:
    print("what went wrong", file=sys.stderr)
    raise ValueError("it did")


@pytest.mark.timeout(60)
def test_a_forked_process_starts_others(tmp_path: Path) -> None:
    process = EngineProcess(tmp_path / "one.log", context=FORK)
    try:
        process.call(_pid_of_another, str(tmp_path / "other.log"))
        assert process.answer(timeout_s=30) not in (os.getpid(), 0)
    finally:
        process.close()


def test_a_forked_process_prints_to_its_log(tmp_path: Path) -> None:
    process = EngineProcess(tmp_path / "log", context=FORK)
    try:
        process.call(_complain)
        with pytest.raises(EngineError, match="what went wrong"):
            process.answer(timeout_s=30)
    finally:
        process.close()
