# SPDX-License-Identifier: Apache-2.0
"""Decode with an engine in this process, count its steps, and measure where their time goes."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from benchmarks.harness.engine import Engine, Request
from benchmarks.harness.process import end_turn, report_item
from benchmarks.harness.steps import (
    Emission,
    engine_core,
    keep_busy,
    model_runner,
    request_index,
    watch_steps,
)


@dataclass
class Response:
    """One finished request.

    Moments are seconds of the process's clock, which stands still while other engines have their
    turns. `steps` and its milliseconds are sums over the steps that decoded for this request beside
    any others, and in which no prompt ended. `busy_s` and `busy_tokens` are its end, or the moment
    from which fewer than `concurrency` were in flight, and the tokens that it had by then.
    """

    name: str
    token_ids: list[int] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)
    begin_s: float = 0.0
    first_s: float = 0.0
    end_s: float = 0.0
    emitted: int = 0
    forwards: int = 0
    verified: int = 0
    steps: int = 0
    step_ms: float = 0.0
    verify_ms: float = 0.0
    draft_ms: float = 0.0
    busy_s: float = 0.0
    busy_tokens: int = 0


def start_driver(engine: Engine) -> Driver:
    """Build the engine in this process.

    Every engine of the table, vLLM's own too, loads its compiled graphs as this plugin's engines
    do: the code is the same, and each start takes a minute less.
    """
    from vllm import LLM

    import vllm_bastion
    from vllm_bastion.cpu.stored_graphs import complete_when_read

    found, wanted = Path(vllm_bastion.__file__).resolve().parents[1], engine.paths()
    assert not wanted or found == wanted[0].resolve(), f"the package comes from {found}"
    with complete_when_read():
        return Driver(LLM(**engine.arguments()), engine.probe)


class Clock:
    """Milliseconds spent in watched calls, by part; a nested call counts for the outer one."""

    def __init__(self) -> None:
        self._ms: dict[str, float] = {}
        self._inside = False

    def watch(self, owner: Any, name: str, part: str) -> None:
        """Add the time of each call of `owner.name` to a part."""
        call = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return call(*args, **kwargs)
            self._inside = True
            begin = self._now()
            try:
                return call(*args, **kwargs)
            finally:
                self._inside = False
                self._add(part, begin)

        setattr(owner, name, timed)

    def lap(self) -> dict[str, float]:
        done, self._ms = self._ms, {}
        return done

    def _now(self) -> Any:
        return time.perf_counter()

    def _add(self, part: str, begin: Any) -> None:
        self._ms[part] = self._ms.get(part, 0.0) + 1e3 * (time.perf_counter() - begin)


class CudaClock(Clock):
    """The same on a GPU, by events of the current stream. A lap has what has completed by then."""

    def __init__(self) -> None:
        super().__init__()
        self._pending: deque[tuple[str, Any, Any]] = deque()

    def lap(self) -> dict[str, float]:
        while self._pending and self._pending[0][2].query():
            part, begin, end = self._pending.popleft()
            self._ms[part] = self._ms.get(part, 0.0) + begin.elapsed_time(end)
        return super().lap()

    def _now(self) -> Any:
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _add(self, part: str, begin: Any) -> None:
        self._pending.append((part, begin, self._now()))


class Driver:
    """probe: see `Engine`."""

    def __init__(self, llm: Any, probe: str | None = None) -> None:
        import torch

        self._llm = llm
        self.probed = None if probe is None else resolve_name(probe)(llm)
        self._scheduler = engine_core(llm).scheduler
        self._runner = model_runner(llm)
        cuda = torch.cuda.is_available()
        self._clock = CudaClock() if cuda else Clock()
        if cuda:
            # A FULL graph replays without a call of the model.
            self._clock.watch(self._runner, "execute_model", "verify")
        else:
            # Only the decoder inside the target is compiled, so its outermost `forward` can be
            # wrapped.
            self._clock.watch(self._runner.model, "forward", "verify")
        self._clock.watch(self._runner.model, "compute_logits", "verify")
        # V1 has a drafter, Model Runner V2 a speculator; plain decoding has neither.
        for name in ("drafter", "speculator"):
            proposer = getattr(self._runner, name, None)
            if hasattr(proposer, "propose"):
                self._clock.watch(proposer, "propose", "draft")
        self._responses: list[Response] = []
        self._waited_s = 0.0  # in other engines' turns
        self._refills = 0  # replies that may end before a place stays empty

    def drive(
        self,
        requests: list[Request],
        concurrency: int,
        turn_s: float = math.inf,
        stream: bool = False,
    ) -> list[Response]:
        """Decode all requests, `concurrency` at a time.

        Each `Response` is also sent to the caller's `items` as soon as it is finished.

        Args:
            turn_s: seconds after which, between two steps, other engines have their turns.
            stream: send (index of a request, new token ids) in place of responses.
        """
        self._stream = stream
        named = [(str(index), request) for index, request in enumerate(requests)]
        self._responses = [Response(request.name) for request in requests]
        self._refills = max(0, len(requests) - concurrency) or len(requests)
        original = self._scheduler.update_from_output
        watch_steps(self._scheduler, self._count)
        self._watch_times()
        turn_ends = self._now() + turn_s
        for outputs in keep_busy(self._llm.llm_engine, named, concurrency, self._begin):
            now = self._now()
            busy = self._refills >= 0
            for output in outputs:
                self._note(output, now, busy)
            if now >= turn_ends:
                self._waited_s += end_turn()
                turn_ends = self._now() + turn_s
        self._scheduler.update_from_output = original
        return self._responses

    def _now(self) -> float:
        return time.perf_counter() - self._waited_s

    def _note(self, output: Any, now: float, busy: bool) -> None:
        index = request_index(output.request_id)
        response = self._responses[index]
        response.first_s = response.first_s or now
        if busy:
            response.busy_s, response.busy_tokens = now, len(output.outputs[0].token_ids)
        if output.finished:
            self._refills -= 1
            response.token_ids = list(output.outputs[0].token_ids)
            response.prompt_ids = list(getattr(output, "prompt_token_ids", None) or ())
            response.end_s = now
            if not self._stream:
                report_item(response)

    def _begin(self, name: str) -> None:
        self._responses[int(name)].begin_s = self._now()

    def _count(self, emissions: list[Emission]) -> None:
        for one in emissions:
            index = request_index(one.request_id)
            if self._stream:
                report_item((index, [int(token) for token in one.tokens]))
            if not one.ends_prompt:
                response = self._responses[index]
                response.emitted += len(one.tokens)
                response.forwards += 1
                response.verified += one.verified

    def _watch_times(self) -> None:
        """Add up the times of steps, each from the end of the one before to its own end."""
        update = self._scheduler.update_from_output
        before: float | None = None

        def watched(scheduled: Any, output: Any) -> Any:
            nonlocal before
            done = update(scheduled, output)
            now = self._now()
            parts = self._clock.lap()
            drafts = scheduled.scheduled_spec_decode_tokens
            rows = scheduled.num_scheduled_tokens
            # Each request has one row and its drafts, and none a prompt.
            decodes = all(n == 1 + len(drafts.get(name, ())) for name, n in rows.items())
            if before is not None and decodes:
                step_ms = 1e3 * (now - before)
                for name in rows:
                    one = self._responses[request_index(name)]
                    one.steps += 1
                    one.step_ms += step_ms
                    one.verify_ms += parts.get("verify", 0.0)
                    one.draft_ms += parts.get("draft", 0.0)
            before = now
            return done

        self._scheduler.update_from_output = watched
