# SPDX-License-Identifier: Apache-2.0
"""Decode with an engine in this process, and measure where the time of its steps goes."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from benchmarks.harness.decoder import (
    Completion,
    count,
    count_steps,
    engine_core,
    model_runner,
    request_index,
)
from benchmarks.harness.engine import Engine, Request


@dataclass
class Outcome:
    """One drive of an engine over some requests."""

    tokens: int = 0
    seconds: float = 0.0
    # mean over requests
    tpot_ms: float = 0.0
    # over requests and their forwards, see `benchmarks.harness.decoder`
    forwards: int = 0
    emitted: int = 0
    verified: int = 0
    # Sums over the steps in which no prompt ended.
    steps: int = 0
    step_ms: float = 0.0
    verify_ms: float = 0.0
    draft_ms: float = 0.0
    # The requests' token ids, in their order.
    token_ids: list[list[int]] = field(default_factory=list)
    # Sums over bastion's timed steps: see `watch_predictions`.
    squared_ms: dict[str, float] = field(default_factory=dict)
    timed_steps: int = 0


def start_driver(engine: Engine) -> Driver:
    """Build the engine in this process.

    Every engine of the table, vLLM's own too, loads its compiled graphs as this plugin's engines
    do: the code is the same, and each start takes a minute less.
    """
    from vllm import LLM

    from vllm_bastion.cpu.stored_graphs import complete_when_read

    with complete_when_read():
        return Driver(LLM(**engine.arguments()))


class Clock:
    """Seconds spent in the target and in the drafter; a nested call counts for the outer one."""

    def __init__(self) -> None:
        self.verify_s = self.draft_s = 0.0
        self._inside = False

    def watch(self, owner: Any, name: str, what: str) -> None:
        """Add the time of each call of `owner.name` to the field `what`."""
        call = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return call(*args, **kwargs)
            self._inside = True
            begin = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self._inside = False
                setattr(self, what, getattr(self, what) + time.perf_counter() - begin)

        setattr(owner, name, timed)


class Driver:
    """Drives one engine, as often as asked."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._scheduler = engine_core(llm).scheduler
        self._runner = model_runner(llm)
        self._clock = Clock()
        # Only the decoder inside the target is compiled, so its outermost `forward` can be wrapped.
        self._clock.watch(self._runner.model, "forward", "verify_s")
        self._clock.watch(self._runner.model, "compute_logits", "verify_s")
        # V1 has a drafter, Model Runner V2 a speculator; plain decoding has neither.
        for name in ("drafter", "speculator"):
            if getattr(self._runner, name, None) is not None:
                self._clock.watch(getattr(self._runner, name), "propose", "draft_s")
        self._outcome = Outcome()
        watch_predictions(self._runner, lambda errors: self._predicted(errors))

    def drive(self, requests: list[Request], concurrency: int) -> Outcome:
        """Decode all requests, `concurrency` at a time."""
        engine, outcome = self._llm.llm_engine, Outcome()
        self._outcome = outcome
        completions = [Completion(request.name) for request in requests]
        original = self._scheduler.update_from_output
        count_steps(self._llm, completions)
        self._watch_steps(outcome)
        waiting = deque(enumerate(requests))
        running = 0
        first = [0.0] * len(requests)
        last = [0.0] * len(requests)
        begin = time.perf_counter()
        while waiting or running:
            while waiting and running < concurrency:
                index, request = waiting.popleft()
                engine.add_request(str(index), request.prompt, request.sampling_params())
                running += 1
            outputs = engine.step()
            now = time.perf_counter()
            for output in outputs:
                index = request_index(output.request_id)
                first[index] = first[index] or now
                if output.finished:
                    running -= 1
                    last[index] = now
                    completions[index].token_ids = list(output.outputs[0].token_ids)
        outcome.seconds = time.perf_counter() - begin
        self._scheduler.update_from_output = original
        outcome.token_ids = [completion.token_ids for completion in completions]
        outcome.tokens = sum(map(len, outcome.token_ids))
        spans = [
            1e3 * (end - start) / max(1, len(ids) - 1)
            for start, end, ids in zip(first, last, outcome.token_ids, strict=True)
        ]
        outcome.tpot_ms = sum(spans) / len(spans)
        total = count(completions)
        outcome.forwards, outcome.emitted = total.forwards, total.tokens
        outcome.verified = total.verified
        return outcome

    def _watch_steps(self, outcome: Outcome) -> None:
        """Add up the times of steps, each from the end of the one before to its own end."""
        update, clock = self._scheduler.update_from_output, self._clock
        before: tuple[float, float, float] | None = None

        def watched(scheduled: Any, output: Any) -> Any:
            nonlocal before
            done = update(scheduled, output)
            now = time.perf_counter(), clock.verify_s, clock.draft_s
            if before is not None and decodes_only(scheduled):
                step, verify, draft = (1e3 * (b - a) for a, b in zip(before, now, strict=True))
                outcome.steps += 1
                outcome.step_ms += step
                outcome.verify_ms += verify
                outcome.draft_ms += draft
            before = now
            return done

        self._scheduler.update_from_output = watched

    def _predicted(self, errors: dict[str, float]) -> None:
        self._outcome.timed_steps += 1
        for name, error in errors.items():
            sums = self._outcome.squared_ms
            sums[name] = sums.get(name, 0.0) + error * error


def decodes_only(scheduled: Any) -> bool:
    """Whether a step only decodes: each request has one row and its drafts, and none a prompt."""
    drafts = scheduled.scheduled_spec_decode_tokens
    rows = scheduled.num_scheduled_tokens
    return all(count == 1 + len(drafts.get(name, ())) for name, count in rows.items())


def watch_predictions(runner: Any, note: Callable[[dict[str, float]], None]) -> None:
    """Call `note` with the errors, in ms, of bastion's predictions for each timed step.

    `roofline`, `calibrated` and `table` predict the target's forward pass: the bare roofline, the
    paper's calibrated one, and the measured table. `C(N) at start-up` predicts the whole cycle from
    the table alone; `C(N)` uses the current costs, corrected by earlier steps. An engine with a
    fixed budget times nothing.
    """
    runtime = getattr(getattr(runner, "speculator", None), "runtime", None)
    if runtime is None or runtime.timer is None:
        return
    # Imported here, because engines without the plugin must not import it.
    from vllm.distributed.parallel_state import get_world_group

    from vllm_bastion.calibration.engine import bare_roofline
    from vllm_bastion.policy.cost.fit import calibrate

    timer, trees, table = runtime.timer, runtime.trees, runtime.costs.latency.table
    roofline = bare_roofline(runner, get_world_group())
    curves = {} if roofline is None else {"roofline": roofline}
    if roofline is not None:
        curves["calibrated"] = calibrate(roofline, table.samples)
    completed = timer.completed

    def watched() -> Iterator[Any]:
        for step in completed():
            if step.verified and step.drafted and step.total_ms is not None:
                rows, reqs, context = step.rows, step.num_reqs, step.context_len
                forward = table.forward_ms(reqs, context)[min(rows, table.max_rows)]
                start_up = table.cost_ms(reqs, context)[min(rows, table.max_rows)]
                errors = {"table": forward - step.forward_ms}
                for name, curve in curves.items():
                    errors[name] = curve.predict_ms(rows, context, reqs) - step.forward_ms
                errors["C(N) at start-up"] = start_up - step.total_ms
                errors["C(N)"] = trees.cost_ms_host[rows] - step.total_ms
                note({name: float(error) for name, error in errors.items()})
            yield step

    timer.completed = watched


def rmse(outcomes: list[Outcome]) -> dict[str, float]:
    """Root mean squares of the errors, ms, over all timed steps."""
    steps = sum(outcome.timed_steps for outcome in outcomes)
    names = {name for outcome in outcomes for name in outcome.squared_ms}
    sums = {n: sum(outcome.squared_ms.get(n, 0.0) for outcome in outcomes) for n in names}
    return {name: math.sqrt(sums[name] / steps) for name in sorted(sums)}
