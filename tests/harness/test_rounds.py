# SPDX-License-Identifier: Apache-2.0
"""Who decodes what and when, over engines that only say what they were asked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_engines import Host

from benchmarks.chat import Renderer
from benchmarks.e2e import rounds
from benchmarks.e2e.methods import PLAIN, Method
from benchmarks.e2e.rounds import Plan
from benchmarks.e2e.store import Round, Store
from benchmarks.prompts import Prompt

PROMPTS = [Prompt("a", "0", ("x", "y")), Prompt("a", "1", ("x",)), Prompt("b", "2", ("x",))]


class _Ids(Renderer):
    """Three tokens a turn."""

    def __init__(self) -> None:
        pass

    def ids(self, prompt: Prompt, replies: Sequence[Sequence[int]]) -> list[int]:
        return [1, 2, 3] * (1 + len(replies))


def decode(
    path: Path, names: str, alive: int, concurrency: Sequence[int] = (1,), **more: Any
) -> list[Any]:
    methods = {name: Method(name, {"method": "bastion"}) for name in names.split()}
    methods = {PLAIN: Method(PLAIN), **methods}
    plan = Plan(methods, PROMPTS, [0.0], concurrency, 2, alive=alive, **more)
    store = Store(path, {}, {})
    rounds.Runner(plan, store, _Ids(), lambda method, most: (method, most)).run()  # type: ignore
    return list(store.of_kind("round"))


def by_round(rows: list[Any]) -> dict[tuple[Any, str], set[str]]:
    found: dict[tuple[Any, str], set[str]] = {}
    for row in rows:
        found.setdefault((Round.of(row), row["group"]), set()).add(row["method"])
    return found


def test_every_prompt_goes_to_every_engine_before_the_next_in_an_order_that_rotates(
    tmp_path: Path, host: Host
) -> None:
    rows = decode(tmp_path / "a.jsonl", "x y", 3)
    assert len(rows) == 3 * 4
    assert host.started == [("x", 1), ("y", 1), (PLAIN, 1)]
    names = ["x", "y", PLAIN]
    assert host.decoded == [names[(i + j) % 3] for i in range(4) for j in range(3)]
    assert list(by_round(rows).values()) == [{PLAIN, "x", "y"}] * 4
    assert not host.awake
    assert all(row["differs"] == {} for row in rows if row["method"] != PLAIN)


def test_at_a_higher_concurrency_a_round_has_more_prompts_and_engines_are_shared(
    tmp_path: Path, host: Host
) -> None:
    rows = decode(tmp_path / "a.jsonl", "x", 2, (1, 4))
    assert host.started == [("x", 4), (PLAIN, 4)]
    # One at a time: four prompts and turns. Four at a time: set a, its second turn, set b.
    assert len(by_round(rows)) == 4 + 3
    assert {row["responses"] for row in rows if row["concurrency"] == 4} == {1, 2}


def test_engines_take_turns_within_a_round_and_pass_by_pass(
    tmp_path: Path, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [Prompt("a", str(number), ("x",)) for number in range(5)]
    monkeypatch.setattr(__name__ + ".PROMPTS", prompts)
    rows = decode(tmp_path / "a.jsonl", "x", 2, (4,))
    assert host.decoded == ["x", PLAIN] * 3 and [row["responses"] for row in rows] == [5, 5]
    host.decoded.clear()
    decode(tmp_path / "b.jsonl", "x", 1, (4,))
    assert host.decoded == [PLAIN, "x"]
    rows = decode(tmp_path / "c.jsonl", "x", 2, (4,), passes=2, size=3)
    assert [row["number"] for row in rows] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [row["responses"] for row in rows[::2]] == [3, 2, 3, 2]


def test_a_restart_in_other_groups_decodes_what_is_missing_beside_plain_decoding(
    tmp_path: Path, host: Host
) -> None:
    path = tmp_path / "a.jsonl"
    decode(path, "x", 2)
    host.started.clear()
    rows = decode(path, "x y z", 4)
    assert host.started == [("y", 1), ("z", 1), (PLAIN, 1)]
    assert list(by_round(rows).values()) == [{PLAIN, "x"}] * 4 + [{PLAIN, "y", "z"}] * 4
    host.started.clear()
    assert len(decode(path, "x y z", 3)) == len(rows)
    assert not host.started
