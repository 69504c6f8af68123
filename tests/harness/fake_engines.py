# SPDX-License-Identifier: Apache-2.0
"""Engines that decode nothing: they note what they are asked, and when."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from benchmarks.e2e.methods import PLAIN, Method
from benchmarks.harness.driver import Response
from benchmarks.harness.engine import Engine, Request

Asked = tuple[Method, int] | Engine


def name_of(engine: Asked) -> str:
    """A method's name; of an engine only whose it is."""
    if isinstance(engine, tuple):
        return engine[0].name
    if engine.speculative is None:
        return PLAIN
    return "ours" if engine.checkout is None else "theirs"


class Host:
    """Runs one process at a time, and notes who decoded; `seconds` of a request, by engine."""

    def __init__(self) -> None:
        self.awake: set[str] = set()
        self.decoded: list[str] = []
        self.started: list[tuple[str, int]] = []
        self.seconds: dict[str, float] = {}

    @contextmanager
    def begun(self, engine: Asked) -> Iterator[Process]:
        process = Process(name_of(engine), self)
        yield process
        self.awake.discard(process.name)


class Process:
    """Decodes two responses a turn, if it has turns at all."""

    def __init__(self, name: str, host: Host) -> None:
        self.name, self._host = name, host
        self._requests: list[Request] = []

    def start(self, _: object, engine: Asked) -> None:
        assert not self._host.awake, "another engine runs"
        self._host.awake.add(self.name)
        most = engine[1] if isinstance(engine, tuple) else engine.max_num_seqs
        self._host.started.append((self.name, most))

    def pause(self) -> None:
        self._host.awake.remove(self.name)

    def resume(self) -> None:
        self._host.awake.add(self.name)

    def call(
        self, what: str, requests: list[Request], concurrency: int, turn_s: float | None = None
    ) -> None:
        assert what == "drive" and self.name in self._host.awake
        self._has_turns = turn_s != math.inf
        self._requests, self._size = requests, 2 if self._has_turns else len(requests)

    def answer(self) -> float:
        assert {one.name for one in self._requests} <= {"warm-up"}
        return 1.0

    def turn(self, items: Callable[[Response], None]) -> bool:
        assert self._host.awake == {self.name} or not self._has_turns
        self._host.decoded.append(self.name)
        now, self._requests = self._requests[: self._size], self._requests[self._size :]
        end_s = self._host.seconds.get(self.name, 0.1)
        for one in now:
            busy = {"busy_s": end_s, "busy_tokens": 2}
            items(Response(one.name, [7, 8], [1, 2, 3], 0.0, 0.0, end_s, 1, 1, 1, **busy))
        return not self._requests

    def next_turn(self) -> None:
        assert self._requests and self.name in self._host.awake
