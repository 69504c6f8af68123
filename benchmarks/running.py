# SPDX-License-Identifier: Apache-2.0
"""An engine's process, seen from outside: it starts, waits where asked to, and decodes."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.engine import (
    STARTED,
    Engine,
    EngineError,
    Request,
    Run,
    changed_environment,
    ended,
    log_tail,
)
from benchmarks.engine_process import serve

_POLL_S = 0.2


class RunningEngine:
    """One engine, which decodes `requests` in a process of its own as soon as it can.

    Args:
        hold: where it waits for `release`, so that others can start meanwhile and nobody decodes
            beside it: `benchmarks.engine.IMPORTED`, `STARTED`.

    Raises:
        EngineError: the engine did not start, or failed; from `poll` and `result`.
    """

    def __init__(self, engine: Engine, requests: list[Request], hold: Sequence[str] = ()) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="bastion-")
        self._log = Path(self._folder.name) / "engine.log"
        self._connection, theirs = spawn.Pipe()
        given = (engine, requests, theirs, self._log, hold)
        self._process = spawn.Process(target=serve, args=given)
        with changed_environment(engine.variables()):
            self._process.start()
        theirs.close()
        self.state = "starting the engine"
        # Where it waits now.
        self.held: str | None = None
        self._done: Run | None = None

    def poll(self) -> bool:
        """Wait a moment for news; whether there was any."""
        try:
            if not self._connection.poll(_POLL_S):
                return False
            kind, value = self._connection.recv()
        except EOFError:
            raise ended(self._process, self._log) from None
        if kind == "error":
            raise EngineError(f"{value}\n{log_tail(self._log)}")
        if kind == "state":
            self.state = value
        elif kind == "held":
            self.held = value
        else:
            self._done = value
        return True

    def release(self) -> None:
        """Let a held engine go on."""
        if self.held == STARTED:
            self.state = "warming up"
        self.held = None
        self._connection.send(None)

    def wait(self, at: str, progress: Callable[[str], None]) -> None:
        """Wait until it is held there; `progress` is called a few times a second."""
        while self.held != at:
            progress(self.state)
            self.poll()

    def result(self, progress: Callable[[str], None]) -> Run:
        """Wait for what was decoded; `progress` is called a few times a second."""
        while self._done is None:
            progress(self.state)
            self.poll()
        return self._done

    def close(self) -> None:
        """End the process; vLLM's own way out takes seconds, and nothing waits for it."""
        self._connection.close()
        if self._process.is_alive():
            self._process.terminate()
        self._process.join()
        self._folder.cleanup()
