# SPDX-License-Identifier: Apache-2.0
"""An engine's process, seen from outside: started, driven, and stopped while others run."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.engine import EngineError, Request, changed_environment, ended, log_tail
from benchmarks.speed.methods import SpeedEngine
from benchmarks.speed.worker import Outcome, serve

_POLL_S = 0.2


class EngineProcess:
    """One engine. At any time at most one of them is let run.

    Raises:
        EngineError: the engine did not start, or failed; from any call.
    """

    def __init__(self, engine: SpeedEngine, log: Path, progress: Callable[[str], None]) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._connection, theirs = spawn.Pipe()
        self._log, self._progress = log, progress
        self._process = spawn.Process(target=serve, args=(engine, theirs, log))
        with changed_environment(engine.variables()):
            self._process.start()
        theirs.close()
        try:
            self.start_s: float = self._answer("starting the engine")
        except BaseException:
            self.close()
            raise
        self._pause()

    def drive(self, requests: list[Request], concurrency: int) -> Outcome:
        """Decode, alone on the machine as far as this benchmark goes."""
        self._signal(signal.SIGCONT)
        try:
            self._connection.send((requests, concurrency))
            return self._answer("decoding")
        finally:
            self._pause()

    def close(self) -> None:
        """End the process."""
        if self._process.is_alive():
            self._signal(signal.SIGCONT)
            self._process.terminate()
            self._process.join(20)
            if self._process.is_alive():
                self._process.kill()
        self._process.join()
        self._connection.close()

    def _answer(self, state: str) -> Any:
        try:
            while not self._connection.poll(_POLL_S):
                self._progress(state)
            kind, value = self._connection.recv()
        except (EOFError, OSError):
            raise ended(self._process, self._log) from None
        if kind == "error":
            raise EngineError(f"{value}\n{log_tail(self._log)}")
        return value

    def _pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        if self._process.is_alive() and self._process.pid is not None:
            os.kill(self._process.pid, number)
