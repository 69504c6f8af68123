# SPDX-License-Identifier: Apache-2.0
"""Turns of two calls, each in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.process import EngineError, EngineProcess, end_turn, report_item

PAUSE_S = 0.2


class Counter:
    def count(self, most: int, fails_at: int | None = None) -> float:
        """Report 0 to `most`, two in a turn. Returns the seconds of others' turns."""
        waited = 0.0
        for number in range(most):
            if number == fails_at:
                raise ValueError("no more")
            report_item(number)
            if number % 2:
                waited += end_turn()
        return waited


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[dict[str, EngineProcess]]:
    found = {name: EngineProcess(tmp_path / f"{name}.log") for name in "ab"}
    for process in found.values():
        process.start(Counter)
    for process in found.values():
        process.answer()
    yield found
    for process in found.values():
        process.close()


def test_calls_go_on_in_turns(processes: dict[str, EngineProcess]) -> None:
    seen: list[tuple[str, int]] = []
    items: dict[str, Any] = {name: partial(lambda n, i: seen.append((n, i)), name) for name in "ab"}
    for name, process in processes.items():
        process.call("count", 5)
        assert not process.turn(items[name])
    for ends in (False, True):
        for name, process in processes.items():
            assert not process.has_answer(), "it waits for its turn"
            process.next_turn()
            assert process.turn(items[name]) is ends
    assert seen == [(n, i) for numbers in ((0, 1), (2, 3), (4,)) for n in "ab" for i in numbers]


def test_a_call_knows_how_long_other_turns_took(processes: dict[str, EngineProcess]) -> None:
    processes["a"].call("count", 2)
    assert not processes["a"].turn()
    time.sleep(PAUSE_S)
    processes["a"].next_turn()
    assert processes["a"].answer() >= PAUSE_S


def test_a_call_that_fails_in_a_later_turn_says_so(processes: dict[str, EngineProcess]) -> None:
    processes["a"].call("count", 9, 3)
    assert not processes["a"].turn()
    processes["a"].next_turn()
    with pytest.raises(EngineError, match="ValueError: no more"):
        processes["a"].turn()
