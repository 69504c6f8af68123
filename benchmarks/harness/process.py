# SPDX-License-Identifier: Apache-2.0
"""A process for one engine: start it, make calls in it, pause it, end it.

    engine = EngineProcess(log)
    engine.start(Decoder, config)   # builds a Decoder in the process
    engine.answer()
    engine.call("decode", requests)
    run = engine.answer()
    engine.close()

`start` and `call` return at once, so that several engines can start side by side. Each is followed
by one `answer`. Between calls the process waits, so nothing runs beside an engine that is timed.
A long call may end its turn now and then (`end_turn`) and wait until the caller continues it:

    engine.call("drive", requests, 16, 1.0)
    while not engine.turn():
        ...                         # another engine's turn
        engine.next_turn()
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.harness.engine import Engine

# Imported before an engine is built; takes seconds and reads no model.
IMPORTS = ("vllm.entrypoints.llm",)
_POLL_S = 0.2
_EXIT_S = 20.0
# How long a call that is interrupted may take to end.
_TRACE_S = 6.0
_LOG_CHARACTERS = 6000
# The end of a fatal error's trace.
_MODULES = re.compile(r"^Extension modules: .*\n?", re.MULTILINE)
_PR_SET_PDEATHSIG = 1

_environment_lock = threading.RLock()
# Set in an engine's process.
_parent: Connection | None = None


class EngineError(RuntimeError):
    """An engine failed to start or to decode. The text ends with the end of its log."""


def ignore(_: Any) -> None:
    """The default callback for items."""


def report_item(item: Any) -> None:
    """Send something to the caller's `items` callback; none is lost, and their order is kept."""
    if _parent is not None:
        _parent.send(("item", item))


def end_turn() -> float:
    """Let other engines run, until `next_turn`. Returns the seconds that this took."""
    assert _parent is not None
    begin = time.perf_counter()
    _parent.send(("turn", None))
    _parent.recv()
    return time.perf_counter() - begin


@contextmanager
def changed_environment(changes: dict[str, str]) -> Iterator[None]:
    """Set environment variables while a process starts; libraries read thread counts on import."""
    with _environment_lock:
        before = dict(os.environ)
        os.environ.update(changes)
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


class EngineProcess:
    """A process that holds one engine.

    Args:
        log: file for everything that the process prints.
        environment: variables added to this process's own.
        imports: modules imported before the first call. If there are any, `answer` the import
            before the first call.
        context: a `multiprocessing` context, by default "spawn".
        paths: folders in front of this process's `sys.path`, such as another checkout's: the
            packages of it that the parent has not imported come from there.
    """

    def __init__(
        self,
        log: Path,
        environment: dict[str, str] | None = None,
        imports: Sequence[str] = (),
        context: Any = None,
        paths: Sequence[Path] = (),
    ) -> None:
        context = context or multiprocessing.get_context("spawn")
        self._log = log
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, str(log), imports, paths))
        with changed_environment(environment or {}):
            self._process.start()
        theirs.close()

    def start(self, factory: Callable[..., Any], *args: Any) -> None:
        """Build `factory(*args)` in the process and keep it there. Answer: the seconds it took."""
        self._send("start", factory, args)

    def call(self, what: str | Callable[..., Any], *args: Any) -> None:
        """Call a method of the object that was built, or a function. Answer: what it returns."""
        self._send("call", what, args)

    def answer(self, timeout_s: float = float("inf"), items: Callable[[Any], None] = ignore) -> Any:
        """Wait for the answer to the last call.

        items: called with each item of `report_item`.

        Raises:
            EngineError: the call failed, the process died, or `timeout_s` passed, and then the text
                says where the process was.
        """
        deadline = time.monotonic() + timeout_s
        while not self._poll(items):
            if time.monotonic() > deadline:
                self._leave_trace(items)
                self.close()
                raise self._error(f"no answer after {timeout_s:.0f} s")
        kind, value = self._answer
        if kind == "error":
            raise self._error(value)
        return value

    def turn(self, items: Callable[[Any], None] = ignore) -> bool:
        """Wait until the call ends its turn. Returns whether it has ended.

        Raises EngineError: the call failed, or the process died.
        """
        self.answer(items=items)
        return self._answer[0] == "done"

    def next_turn(self) -> None:
        """Continue a call whose turn has ended."""
        self._send("turn", "", ())

    def _leave_trace(self, items: Callable[[Any], None]) -> None:
        """Interrupt the call, so that the log says where it was; abort it where it goes on."""
        for number in (signal.SIGINT, signal.SIGABRT):
            self._signal(number)
            deadline = time.monotonic() + _TRACE_S
            try:
                while time.monotonic() < deadline:
                    if self._poll(items):
                        return
            except EngineError:  # it has ended
                return

    def pause(self) -> None:
        """Stop all threads of the process, so that none spins beside another engine."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self, wait_s: float = 0.0) -> None:
        """End the process: let it exit by itself for `wait_s` seconds, then terminate it."""
        self.resume()
        self._connection.close()  # the process exits when it waits for a call
        if wait_s:
            self._process.join(wait_s)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join(_EXIT_S)
        if self._process.is_alive():
            self._process.kill()
        self._process.join()

    def _send(self, kind: str, target: Any, args: tuple[Any, ...]) -> None:
        try:
            self._connection.send((kind, target, args))
        except OSError:
            raise self._died() from None

    def _poll(self, items: Callable[[Any], None]) -> bool:
        try:
            if not self._connection.poll(_POLL_S):
                return False
            self._answer = self._connection.recv()
        except (EOFError, OSError):
            raise self._died() from None
        kind, value = self._answer
        if kind == "item":
            items(value)
        return kind != "item"

    def _died(self) -> EngineError:
        self._process.join(_EXIT_S)
        return self._error(f"the engine's process ended with status {self._process.exitcode}")

    def _error(self, text: str) -> EngineError:
        log = self._log.read_text(errors="replace") if self._log.exists() else "(no log)"
        log = _MODULES.sub("", log)
        return EngineError(f"{text}\n{log[-_LOG_CHARACTERS:]}")

    def _signal(self, number: signal.Signals) -> None:
        if self._process.is_alive() and self._process.pid is not None:
            os.kill(self._process.pid, number)


@contextmanager
def begun(engine: Engine) -> Iterator[EngineProcess]:
    """A process that imports what an engine needs, side by side with others. Answer: None."""
    with tempfile.TemporaryDirectory(prefix="bastion-") as folder:
        log = Path(folder) / "engine.log"
        process = EngineProcess(log, engine.environment, IMPORTS, paths=engine.paths())
        try:
            yield process
        finally:
            process.close()


def _serve(connection: Connection, log: str, imports: Sequence[str], paths: Sequence[Path]) -> None:
    """Entry point of the process: answer calls until the other end is closed."""
    sys.path[:0] = map(str, paths)
    global _parent, _environment_lock
    # A forked process has a copy of the lock that its parent holds meanwhile.
    _parent, _environment_lock = connection, threading.RLock()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    # A forked process has its parent's streams, which pytest replaces.
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    # Both leave a trace in the log; a shell's background job would ignore the first.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.enable(all_threads=True)  # SIGABRT
    if sys.platform == "linux":  # a stopped process would outlive a parent that was killed
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # tqdm's default lock is a semaphore that would be leaked when the process is terminated.
    tqdm.set_lock(threading.RLock())
    instance: Any = None
    try:
        for name in imports:
            importlib.import_module(name)
        if imports:
            connection.send(("done", None))
        while True:
            kind, target, args = connection.recv()
            if kind == "start":
                begin = time.perf_counter()
                instance = target(*args)
                answer: Any = time.perf_counter() - begin
            else:
                answer = (getattr(instance, target) if isinstance(target, str) else target)(*args)
            connection.send(("done", answer))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except BaseException as error:
        traceback.print_exc()
        sys.stderr.flush()
        connection.send(("error", f"{type(error).__name__}: {error}"))
