# SPDX-License-Identifier: Apache-2.0
"""Decode what is missing in a results file, one row for each method and round.

Engines that live side by side take turns of a second within a round, and the others are stopped.
The order rotates. The rows of a round are written together, so a ratio to plain decoding always has
both of its sides. With one engine at a time, the rounds of an engine follow one another.
"""

from __future__ import annotations

import math
import re
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from tqdm import tqdm

from benchmarks.chat import Renderer
from benchmarks.e2e.methods import PLAIN, REFERENCE, Method, groups, reference_of
from benchmarks.e2e.store import Round, Row, Store
from benchmarks.harness.driver import Response, start_driver
from benchmarks.harness.engine import Engine, Request
from benchmarks.harness.process import EngineError, EngineProcess, begun
from benchmarks.harness.steps import first_difference
from benchmarks.prompts import Prompt
from benchmarks.provenance import FOLDER

_WARM_UP_PROMPT, _WARM_UP_TOKENS = 128, 24
_SUMS = ("emitted", "forwards", "verified", "steps", "step_ms", "verify_ms", "draft_ms")


@dataclass(frozen=True)
class Plan:
    """What is decoded.

    Args:
        prompts: all sets' prompts; a prompt's seed is `seed` plus its number in its set.
        size: prompts of a round with a concurrency above 1; with 1 it has one.
        passes: how often all rounds are decoded.
        starts: how often that is done with new engines, in the reversed order each time: of
            engines with the same code those that start later can be faster by a tenth.
        alive: engines that live side by side; 1: one after another.
        turn_s: seconds of a turn. A host's speed changes within tens of seconds.
        seconds: no further round of a set at a temperature and concurrency begins after so long.
    """

    methods: dict[str, Method]
    prompts: Sequence[Prompt]
    temperatures: Sequence[float]
    concurrency: Sequence[int]
    tokens: int
    seed: int = 0
    ignore_eos: bool = False
    size: int | None = None
    passes: int = 1
    starts: int = 1
    alive: int = 1
    turn_s: float = 1.0
    seconds: float = math.inf

    def rounds(
        self, concurrency: int, start: int
    ) -> Iterator[tuple[Round, list[tuple[int, Prompt]]]]:
        """Each round of a start, and its prompts by their numbers in their sets."""
        by_set: dict[str, list[Prompt]] = {}
        for prompt in self.prompts:
            by_set.setdefault(prompt.set, []).append(prompt)
        size = 1 if concurrency == 1 else self.size or 4 * concurrency
        for temperature in self.temperatures:
            for number in range(start * self.passes, (start + 1) * self.passes):
                for name, prompts in by_set.items():
                    numbered = list(enumerate(prompts))
                    count = math.ceil(len(prompts) / size)
                    for i in range(count):
                        own = numbered[i * size : (i + 1) * size]
                        for turn in range(max(len(one.turns) for _, one in own)):
                            where = temperature, concurrency, name, turn, number * count + i
                            yield Round(*where), [one for one in own if turn < len(one[1].turns)]


class Runner:
    """Runs a plan. engine: a method's engine for a concurrency."""

    def __init__(
        self,
        plan: Plan,
        store: Store,
        renderer: Renderer,
        engine: Callable[[Method, int], Engine],
    ) -> None:
        self._plan, self._store, self._renderer, self._engine = plan, store, renderer, engine
        self._rows: dict[tuple[Round, str], Row] = {}  # the first of each
        for row in store.of_kind("round"):
            self._rows.setdefault((Round.of(row), row["method"]), row)

    def run(self) -> None:
        levels = self._plan.concurrency
        with tqdm(unit="round", disable=None, smoothing=0.05) as self._bar:
            # An engine serves all concurrencies in turn, or each has its own.
            for own in [levels] if self._plan.alive > 1 else [[one] for one in levels]:
                for group in groups(list(self._plan.methods), self._plan.alive):
                    for start in range(self._plan.starts):
                        self._run_group(group, own, start)

    def _run_group(self, group: Sequence[str], levels: Sequence[int], start: int) -> None:
        rounds = [one for level in levels for one in self._plan.rounds(level, start)]
        missing = {
            name: [r for r, _ in rounds if (r, name) not in self._rows] for name in group
        }  # fmt: skip
        wanted = [name for name in group if missing[name]]
        if wanted and len(group) > 1 and PLAIN not in wanted:
            wanted.append(PLAIN)
        self._group, self._warm = uuid.uuid4().hex[:12], set[tuple[str, float, int]]()
        with ExitStack() as stack:
            # Plain decoding last: it is not needed where none of the others starts.
            wanted.sort(key=lambda name: name == PLAIN)
            alive = self._start(wanted[:: -1 if start % 2 else 1], max(levels), stack)
            if len(group) > 1 and list(alive) == [PLAIN]:
                return
            spent = Counter[tuple[float, int, str]]()
            for number, (this, prompts) in enumerate(rounds):
                situation, begin = this[:3], time.monotonic()
                if spent[situation] >= self._plan.seconds:
                    continue
                names = [name for name in alive if (this, name) not in self._rows]
                if names and PLAIN in alive and PLAIN not in names:
                    names.append(PLAIN)
                shift = number % max(1, len(names))
                self._round(this, prompts, [*names[shift:], *names[:shift]], alive)
                spent[situation] += time.monotonic() - begin
                self._bar.update()

    def _start(self, names: Sequence[str], most: int, stack: ExitStack) -> dict[str, EngineProcess]:
        """Import side by side, then start one at a time: an engine may time its steps meanwhile."""
        alive, begins = {}, {}
        for name in names:
            engine = self._engine(self._plan.methods[name], most)
            begins[name] = engine, stack.enter_context(begun(engine))
        for step in ("importing", "starting"):
            for name, (engine, process) in list(begins.items()):
                self._bar.set_description(f"{name}, concurrency {most}, {step}")
                try:
                    if step == "starting":
                        process.start(start_driver, engine)
                    seconds = process.answer()
                except EngineError as error:
                    self._gap(name, most, error)
                    del begins[name]
                    continue
                if step == "starting":
                    alive[name] = process
                    self._store.append({"kind": "start", "method": name, "seconds": seconds})
                    if len(names) > 1:
                        process.pause()
        return alive

    def _round(
        self,
        this: Round,
        prompts: Sequence[tuple[int, Prompt]],
        order: Sequence[str],
        alive: dict[str, EngineProcess],
    ) -> None:
        """Decode a round with the engines of `order`, each for a turn at a time."""
        requests = self._requests(this, prompts)
        turn_s = self._plan.turn_s if len(alive) > 1 else math.inf
        waiting, found = deque(order), dict[str, list[Response]]()
        while waiting and requests:
            name = waiting.popleft()
            process = alive[name]
            self._bar.set_description(f"{name}, {this.set}, concurrency {this.concurrency}")
            try:
                process.resume()
                if name in found:
                    process.next_turn()
                else:
                    found[name] = []
                    self._warm_up(name, this, process, requests[0])
                    process.call("drive", requests, this.concurrency, turn_s)
                ended = process.turn(found[name].append)
                if len(alive) > 1:
                    process.pause()
            except EngineError as error:
                self._gap(name, this.concurrency, error)
                del alive[name], found[name]
            else:
                if not ended:
                    waiting.append(name)
        # What others are compared with comes first.
        rows = []
        for name in sorted(found, key=lambda name: (name != PLAIN, name != REFERENCE)):
            rows.append(self._row(this, name, found[name]))
            self._rows.setdefault((this, name), rows[-1])
        if rows:
            self._store.append(*rows)

    def _warm_up(self, name: str, this: Round, process: EngineProcess, first: Request) -> None:
        situation = name, this.temperature, this.concurrency
        if situation not in self._warm:
            self._warm.add(situation)
            prompt = first.prompt[:_WARM_UP_PROMPT]
            request = Request("warm-up", prompt, _WARM_UP_TOKENS, this.temperature, 0)
            process.call("drive", [request] * this.concurrency, this.concurrency)
            process.answer()

    def _requests(self, this: Round, prompts: Sequence[tuple[int, Prompt]]) -> list[Request]:
        found = []
        for number, prompt in prompts:
            replies = self._replies(this, prompt.id)
            if replies is not None:
                params = {"ignore_eos": self._plan.ignore_eos} | prompt.params
                ids = self._renderer.ids(prompt, replies)
                sampling = this.temperature, self._plan.seed + number, params
                found.append(Request(prompt.id, ids, self._plan.tokens, *sampling))
        return found

    def prompt_and_reply(self, this: Round, prompt: Prompt) -> tuple[list[int], list[int]]:
        """Token ids of a prompt in a known round, and plain decoding's reply."""
        ids = self._renderer.ids(prompt, self._replies(this, prompt.id) or [])
        return ids, self._rows[this, PLAIN]["replies"][prompt.id]

    def _replies(self, this: Round, name: str) -> list[list[int]] | None:
        """Plain decoding's replies to the turns before, or None where one is missing."""
        rows = [self._rows.get((this._replace(turn=turn), PLAIN)) for turn in range(this.turn)]
        found = [None if row is None else row["replies"].get(name) for row in rows]
        return None if None in found else [ids for ids in found if ids is not None]

    def _row(self, this: Round, name: str, responses: Sequence[Response]) -> Row:
        method = self._plan.methods[name]
        own = {"kind": "round", **this._asdict(), "method": name, "group": self._group}
        row = own | summary(responses)
        if method.speculative is None:
            row["replies"] = {one.name: one.token_ids for one in responses}
        wanted = reference_of(method, this.temperature, list(self._plan.methods))
        reference = None if wanted is None else self._rows.get((this, wanted))
        if reference is not None:
            row["compared_with"], row["differs"] = wanted, {}
            for one in responses:
                other = reference["replies"][one.name]
                if (at := first_difference(other, one.token_ids)) is not None:
                    row["differs"][one.name] = at, [*one.token_ids, None][at]
        return row

    def _gap(self, name: str, concurrency: int, error: EngineError) -> None:
        reason = short_reason(str(error))
        own = {"kind": "gap", "method": name, "concurrency": concurrency}
        self._store.append(own | {"reason": reason})
        self._bar.write(f"{name}, concurrency {concurrency}: {reason}")


def summary(responses: Sequence[Response]) -> Row:
    """What the responses of a round say together; times are of the engine's own turns.

    `token_ms` is the mean over responses of (end - first token) / (tokens - 1), as in the paper.
    `tokens` and `seconds` end when the round has no prompt left for a reply that has ended.
    """
    each = [1e3 * (r.end_s - r.first_s) / max(1, len(r.token_ids) - 1) for r in responses]
    return {
        "responses": len(responses),
        "tokens": sum(r.busy_tokens for r in responses),
        "seconds": max(r.busy_s for r in responses) - min(r.begin_s for r in responses),
        "token_ms": sum(each) / len(each),
        "ttft_ms": 1e3 * sum(r.first_s - r.begin_s for r in responses) / len(responses),
        **{name: sum(getattr(r, name) for r in responses) for name in _SUMS},
    }


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
