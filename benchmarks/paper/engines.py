# SPDX-License-Identifier: Apache-2.0
"""The process of an engine, and why one did not start."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness.decoder import IMPORTS
from benchmarks.harness.driver import start_driver
from benchmarks.harness.engine import UserEngine
from benchmarks.harness.process import EngineProcess

_REASON = 240
# A directory of this machine, which no result names.
_FOLDER = re.compile(r"(?:/[\w.@+-]+)+/")


@contextmanager
def engine_of(engine: UserEngine, factory: Any = start_driver) -> Iterator[EngineProcess]:
    """A process with a started engine. Raises EngineError: it does not start."""
    with begun(engine, factory) as process:
        wait_until_started(process)
        yield process


def wait_until_started(process: EngineProcess) -> None:
    """Wait for what `begun` began. Raises EngineError: the engine does not start."""
    process.answer()  # its imports
    process.answer()


@contextmanager
def begun(engine: UserEngine, factory: Any = start_driver) -> Iterator[EngineProcess]:
    """A process that is starting an engine, so that several can start side by side."""
    with tempfile.TemporaryDirectory(prefix="bastion-") as folder:
        process = EngineProcess(Path(folder) / "engine.log", engine.variables(), IMPORTS)
        try:
            process.start(factory, engine)
            yield process
        finally:
            process.close()


def short_reason(text: str) -> str:
    """The line of an engine's failure that says why, without the machine's folders."""
    lines = [line.strip() for line in text.splitlines()]
    told = [n for n, line in enumerate(lines) if re.search(r"\b\w*(Error|Exception): ", line)]
    line = lines[told[-1]] if told else (lines or [""])[0]
    if told and re.search(r"\d+ validation errors? for ", line):  # pydantic's reason is below
        below = [one for one in lines[told[-1] + 1 :] if one.startswith("Value error, ")]
        line = f"ValueError: {below[0][13:].partition(' [type=')[0]}" if below else line
    line = re.sub(r"^.*?(?=\b\w*(?:Error|Exception): )", "", line)
    return _FOLDER.sub("", line)[:_REASON]
