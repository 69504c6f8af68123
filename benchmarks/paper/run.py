# SPDX-License-Identifier: Apache-2.0
"""Decode what is missing in a results file, one row per response.

With one engine at a time, a row is written as soon as its response is finished. Engines that live
side by side take turns: in a *round*, each decodes the same prompt (with a concurrency above 1: the
same set), a second at a time, and the others are stopped. The order rotates. The rows of a round
are written together, so a ratio to plain decoding always has both of its sides.
"""

from __future__ import annotations

import math
import re
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from tqdm import tqdm

from benchmarks.harness.decoder import begun, first_difference, wait_until_started
from benchmarks.harness.driver import Response, start_driver
from benchmarks.harness.engine import Request
from benchmarks.harness.process import EngineError, EngineProcess
from benchmarks.paper.chat import Renderer
from benchmarks.paper.methods import PLAIN, REFERENCE, groups, reference_of
from benchmarks.paper.plan import Plan, batches
from benchmarks.paper.store import Key, Row, Store
from benchmarks.provenance import FOLDER

_WARM_UP_PROMPT, _WARM_UP_TOKENS = 128, 24
_STARTS = 2  # engines that start side by side where several live
# Seconds of a turn. A host's speed changes within tens of seconds.
_TURN_S = 1.0


class Runner:
    """Runs a plan. engine: a method's engine for a concurrency."""

    def __init__(self, plan: Plan, store: Store, renderer: Renderer, engine: Any) -> None:
        self._plan, self._store, self._renderer, self._engine = plan, store, renderer, engine
        self._known = store.responses()
        self._prompts = {(one.set, one.id): one for one in plan.prompts}
        self._seeds = plan.seeds()
        self._sessions: dict[Key, str] = {}

    def run(self) -> None:
        with tqdm(unit="response", disable=None, smoothing=0.05) as bar:
            self._bar = bar
            for levels in self._plan.levels():
                for group in groups(list(self._plan.methods), self._plan.alive):
                    self._run_group(group, levels)

    def _run_group(self, group: Sequence[str], levels: Sequence[int]) -> None:
        paired, most = len(group) > 1, max(levels)
        with ExitStack() as stack:
            alive: dict[str, EngineProcess] = {}
            others = [name for name in group if name != PLAIN and self._missing(name, levels)]
            for names in self._starts(others, paired):
                alive |= self._start(names, most, paired, stack)
            # Plain decoding last: it is not needed where none of the others starts.
            if PLAIN in group and (alive or self._missing(PLAIN, levels)):
                alive |= self._start([PLAIN], most, paired, stack)
            for concurrency in levels:
                self._run_rounds(group, alive, concurrency, paired)

    def _starts(self, names: Sequence[str], paired: bool) -> list[Sequence[str]]:
        """Which engines start side by side: not those that time their own steps."""
        measuring = [[name] for name in names if self._plan.methods[name].measures]
        others = [name for name in names if [name] not in measuring]
        size = _STARTS if paired else 1
        return [*(others[i : i + size] for i in range(0, len(others), size)), *measuring]

    def _start(
        self, names: Sequence[str], most: int, paired: bool, stack: ExitStack
    ) -> dict[str, EngineProcess]:
        self._bar.set_description(f"{' and '.join(names)}, concurrency {most}, starting")
        started = {
            name: stack.enter_context(
                begun(self._engine(self._plan.methods[name], most), start_driver)
            )
            for name in names
        }
        for name, process in list(started.items()):
            try:
                wait_until_started(process)
            except EngineError as error:
                self._gap(name, most, error)
                del started[name]
            else:
                if paired:
                    process.pause()
        return started

    def _run_rounds(
        self,
        group: Sequence[str],
        alive: dict[str, EngineProcess],
        concurrency: int,
        paired: bool,
    ) -> None:
        units = list(batches(self._plan.keys(PLAIN), concurrency, paired))
        self._bar.total = self._bar.n + sum(
            len(keys) for unit in units for keys in self._round(alive, unit, paired).values()
        )
        self._warm: set[tuple[str, float]] = set()
        for number, unit in enumerate(units):
            shift = number % len(group)
            rounds = self._round(alive, unit, paired)
            order = [name for name in (*group[shift:], *group[:shift]) if rounds.get(name)]
            found: dict[Key, Response] = {}
            keep = found.__setitem__ if paired else self._keep_one
            turn_s = _TURN_S if paired else math.inf
            self._take_turns(alive, order, concurrency, rounds, keep, turn_s)
            self._keep_round(found, {"round": uuid.uuid4().hex[:12]})

    def _take_turns(
        self,
        alive: dict[str, EngineProcess],
        order: Sequence[str],
        concurrency: int,
        rounds: dict[str, list[Key]],
        keep: Callable[[Key, Response], None],
        turn_s: float,
    ) -> None:
        """Decode a unit with the engines of `order`, each for `turn_s` seconds at a time."""
        waiting, received = deque(order), {}
        while waiting:
            name = waiting.popleft()
            process = alive[name]
            self._bar.set_description(f"{name}, concurrency {concurrency}")
            try:
                process.resume()
                if name in received:
                    process.next_turn()
                else:
                    received[name] = self._begin(
                        name, process, concurrency, rounds[name], keep, turn_s
                    )
                ended = process.turn(received[name])
                if turn_s < math.inf:
                    process.pause()
            except EngineError as error:
                self._gap(name, concurrency, error)
                del alive[name]
            else:
                if not ended:
                    waiting.append(name)

    def _missing(self, name: str, levels: Sequence[int]) -> bool:
        keys = self._plan.keys(name)
        return any(key.concurrency in levels and key not in self._known for key in keys)

    def _round(self, names: Iterable[str], unit: list[Key], paired: bool) -> dict[str, list[Key]]:
        """What each of the methods has to decode of a unit, which has plain decoding's keys.

        Side by side, plain decoding decodes again what any of the others lacks.
        """
        lacks = {
            name: [key for one in unit if (key := one._replace(method=name)) not in self._known]
            for name in names
        }
        if paired and PLAIN in lacks:
            wanted = {key._replace(method=PLAIN) for keys in lacks.values() for key in keys}
            lacks[PLAIN] = [key for key in unit if key in wanted]
        return lacks

    def _gap(self, name: str, concurrency: int, error: EngineError) -> None:
        reason = short_reason(str(error))
        row = {"method": name, "concurrency": concurrency, "reason": reason}
        self._store.append({"kind": "gap", **row})
        self._bar.write(f"{name}, concurrency {concurrency}: {reason}")

    def _begin(
        self,
        name: str,
        process: EngineProcess,
        concurrency: int,
        keys: list[Key],
        keep: Callable[[Key, Response], None],
        turn_s: float,
    ) -> Callable[[Response], None]:
        """Begin the responses of one temperature, set and turn. Returns what receives them."""
        requests = {}
        for key in keys:
            replies = self._replies(key)
            if replies is not None:
                requests[key] = self._request(str(len(requests)), key, replies)
        if requests and (name, keys[0].temperature) not in self._warm:
            self._warm.add((name, keys[0].temperature))
            first = next(iter(requests.values()))
            begin = first.prompt[:_WARM_UP_PROMPT]
            warm_up = Request("warm-up", begin, _WARM_UP_TOKENS, first.temperature, 0)
            process.call("drive", [warm_up] * concurrency, concurrency)
            process.answer()
        named, session = list(requests), uuid.uuid4().hex[:12]  # by their numbers

        def received(response: Response) -> None:
            key = named[int(response.name)]
            self._sessions[key] = session
            keep(key, response)
            self._bar.update()

        process.call("drive", list(requests.values()), concurrency, turn_s)
        return received

    def _keep_one(self, key: Key, response: Response) -> None:
        self._keep_round({key: response}, {})

    def _keep_round(self, found: dict[Key, Response], fields: Row) -> None:
        """Append responses; those that others are compared with come first."""
        rows = []
        for key in sorted(found, key=lambda key: (key.method != PLAIN, key.method != REFERENCE)):
            row = self._row(key, found[key]) | fields
            self._known.setdefault(key, row)
            rows.append(row)
        if rows:
            self._store.append(*rows)

    def _request(self, name: str, key: Key, replies: list[list[int]]) -> Request:
        where = key.set, key.id
        return Request(
            name,
            self._renderer.ids(self._prompts[where], replies),
            self._plan.tokens,
            key.temperature,
            self._seeds[where],
            {"ignore_eos": self._plan.ignore_eos} | self._prompts[where].params,
        )

    def prompt_and_reply(self, key: Key) -> tuple[list[int], list[int]]:
        """The token ids of a known response's prompt, and plain decoding's of its reply."""
        ids = self._renderer.ids(self._prompts[key.set, key.id], self._replies(key) or [])
        return ids, self._reference(key, PLAIN)["token_ids"]

    def _replies(self, key: Key) -> list[list[int]] | None:
        """Plain decoding's replies to the turns before, or None where one is missing."""
        replies = []
        for turn in range(key.turn):
            row = self._reference(key._replace(turn=turn), PLAIN)
            if row is None:
                return None
            replies.append(row["token_ids"])
        return replies

    def _reference(self, key: Key, method: str) -> Row | None:
        return self._known.get(key._replace(method=method, concurrency=self._plan.concurrency[0]))

    def _row(self, key: Key, response: Response) -> Row:
        session = self._sessions[key]
        row = {"kind": "response", **key._asdict(), "session": session, **asdict(response)}
        ids = row.pop("token_ids")
        del row["name"]
        row["tokens"] = len(ids)
        if key.method in (PLAIN, REFERENCE):
            row["token_ids"] = ids
        method = self._plan.methods[key.method]
        name = reference_of(method, key.temperature, list(self._plan.methods))
        reference = None if name is None else self._reference(key, name)
        if reference is not None and name != key.method:
            row["compared_with"] = name
            row["differs_at"] = first_difference(reference["token_ids"], ids)
            if row["differs_at"] is not None:
                row["token"] = [*ids, None][row["differs_at"]]
        return row


def short_reason(text: str) -> str:
    """The line of an engine's failure that says why, without the machine's folders."""
    lines = [line.strip() for line in text.splitlines()]
    told = [n for n, line in enumerate(lines) if re.search(r"\b\w*(Error|Exception): ", line)]
    line = lines[told[-1]] if told else (lines or [""])[0]
    if told and re.search(r"\d+ validation errors? for ", line):  # pydantic's reason is below
        below = [one for one in lines[told[-1] + 1 :] if one.startswith("Value error, ")]
        line = f"ValueError: {below[0][13:].partition(' [type=')[0]}" if below else line
    line = re.sub(r"^.*?(?=\b\w*(?:Error|Exception): )", "", line)
    return FOLDER.sub("", line)[:240]
