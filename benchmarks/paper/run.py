# SPDX-License-Identifier: Apache-2.0
"""Decode what is missing in a results file: one engine after another, one row per response."""

from __future__ import annotations

import re
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.harness.decoder import IMPORTS
from benchmarks.harness.engine import Request
from benchmarks.harness.process import EngineError, EngineProcess
from benchmarks.paper.chat import Renderer
from benchmarks.paper.data import Prompt
from benchmarks.paper.methods import PLAIN, REFERENCE, Method, reference_of
from benchmarks.paper.store import Key, Row, Store
from benchmarks.speed.driver import Response, start_driver
from benchmarks.speed.methods import SpeedEngine

_WARM_UP_PROMPT, _WARM_UP_TOKENS = 128, 24
_REASON = 240
# A directory of this machine, which no result names.
_FOLDER = re.compile(r"(?:/[\w.@+-]+)+/")


@dataclass(frozen=True)
class Plan:
    """What is decoded.

    Args:
        prompts: all sets' prompts; a prompt's seed is `seed` plus its number in its set.
        concurrency: requests at a time, the reference's first.
    """

    methods: dict[str, Method]
    prompts: Sequence[Prompt]
    temperatures: Sequence[float]
    concurrency: Sequence[int]
    tokens: int
    seed: int
    ignore_eos: bool

    def keys(self, method: str) -> Iterator[Key]:
        """Every response of a method, in the order of decoding."""
        longest = max(len(prompt.turns) for prompt in self.prompts)
        for concurrency in self.concurrency:
            for temperature in self.temperatures:
                for turn in range(longest):
                    for one in self.prompts:
                        if turn < len(one.turns):
                            yield Key(method, temperature, concurrency, one.set, one.id, turn)

    def seeds(self) -> dict[tuple[str, str], int]:
        """The seed of each prompt, by set and id."""
        numbers: dict[str, int] = {}
        seeds = {}
        for prompt in self.prompts:
            number = numbers[prompt.set] = numbers.get(prompt.set, -1) + 1
            seeds[prompt.set, prompt.id] = self.seed + number
        return seeds


class Runner:
    """Runs a plan.

    Args:
        engine: a method's engine for a concurrency.
    """

    def __init__(self, plan: Plan, store: Store, renderer: Renderer, engine: Any) -> None:
        self._plan, self._store, self._renderer, self._engine = plan, store, renderer, engine
        self._known = store.responses()
        self._prompts = {(one.set, one.id): one for one in plan.prompts}
        self._seeds = plan.seeds()

    def run(self) -> None:
        """Decode every missing response."""
        missing = {
            name: [key for key in self._plan.keys(name) if key not in self._known]
            for name in self._plan.methods
        }
        with tqdm(
            total=sum(map(len, missing.values())), unit="response", disable=None, smoothing=0.05
        ) as bar:
            for name, keys in missing.items():
                for concurrency in self._plan.concurrency:
                    own = [key for key in keys if key.concurrency == concurrency]
                    if own:
                        self._run_engine(name, concurrency, own, bar)

    def _run_engine(self, name: str, concurrency: int, keys: list[Key], bar: Any) -> None:
        bar.set_description(f"{name}, concurrency {concurrency}")
        before = bar.n
        try:
            with engine_of(self._engine(self._plan.methods[name], concurrency)) as process:
                for batch in _batches(keys):
                    self._drive(process, concurrency, batch, bar)
        except EngineError as error:
            reason = short_reason(str(error))
            row = {"method": name, "concurrency": concurrency, "reason": reason}
            self._store.append({"kind": "gap", **row})
            bar.write(f"{name}, concurrency {concurrency}: {reason}")
        bar.update(before + len(keys) - bar.n)

    def _drive(self, process: EngineProcess, concurrency: int, keys: list[Key], bar: Any) -> None:
        """Decode the responses of one temperature, set and turn."""
        requests = {}
        for key in keys:
            replies = self._replies(key)
            if replies is not None:
                requests[key] = self._request(str(len(requests)), key, replies)
        if not requests:
            return
        first = next(iter(requests.values()))
        begin = first.prompt[:_WARM_UP_PROMPT]
        warm_up = Request("warm-up", begin, _WARM_UP_TOKENS, first.temperature, 0)
        process.call("drive", [warm_up] * concurrency, concurrency)
        process.answer()
        session, named = uuid.uuid4().hex[:12], list(requests)  # by their numbers

        def keep(response: Response) -> None:
            key = named[int(response.name)]
            self._known[key] = row = self._row(key, session, response)
            self._store.append(row)
            bar.update()

        process.call("drive", list(requests.values()), concurrency, True)
        process.answer(items=keep)

    def _request(self, name: str, key: Key, replies: list[list[int]]) -> Request:
        where = key.set, key.id
        return Request(
            name,
            self._renderer.ids(self._prompts[where], replies),
            self._plan.tokens,
            key.temperature,
            self._seeds[where],
            {"ignore_eos": self._plan.ignore_eos},
        )

    def first_prompt(self, prompt: Prompt) -> list[int]:
        """The token ids of a conversation's first turn."""
        return self._renderer.ids(prompt, [])

    def prompt_and_reply(self, key: Key) -> tuple[list[int], list[int]]:
        """The token ids of a known response's prompt, and plain decoding's of its reply."""
        plain = self._reference(key, PLAIN)
        assert plain is not None
        ids = self._renderer.ids(self._prompts[key.set, key.id], self._replies(key) or [])
        return ids, plain["token_ids"]

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

    def _row(self, key: Key, session: str, response: Response) -> Row:
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


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Where two texts first differ, or None."""
    for at, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return at
    return None if len(one) == len(other) else min(len(one), len(other))


@contextmanager
def engine_of(engine: SpeedEngine, factory: Any = start_driver) -> Iterator[EngineProcess]:
    """A process with a started engine.

    Raises:
        EngineError: it does not start.
    """
    with tempfile.TemporaryDirectory(prefix="bastion-") as folder:
        process = EngineProcess(Path(folder) / "engine.log", engine.variables(), IMPORTS)
        try:
            process.answer()
            process.start(factory, engine)
            process.answer()
            yield process
        finally:
            process.close()


def short_reason(text: str) -> str:
    """The line of an engine's failure that says why, without the machine's folders."""
    lines = [line.strip() for line in text.splitlines()]
    told = [line for line in lines if re.search(r"\b\w*(Error|Exception): ", line)]
    line = told[-1] if told else (lines or [""])[0]
    line = re.sub(r"^.*?(?=\b\w*(?:Error|Exception): )", "", line)
    return _FOLDER.sub("", line)[:_REASON]


def _batches(keys: Iterable[Key]) -> Iterator[list[Key]]:
    """Keys in order, split where temperature, set or turn changes."""
    batch: list[Key] = []
    for key in keys:
        if batch and _cell(batch[-1]) != _cell(key):
            yield batch
            batch = []
        batch.append(key)
    if batch:
        yield batch


def _cell(key: Key) -> tuple[Any, ...]:
    return key.temperature, key.set, key.turn
