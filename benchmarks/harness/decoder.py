# SPDX-License-Identifier: Apache-2.0
"""Decode requests with one engine, and count its steps.

A *forward* of a request is a step of the engine in which the target emitted tokens for it. The step
that ends the prompt and the token it emits are left out, so plain decoding has tau 1 exactly.
tau = tokens emitted / forwards. A step counts with all the tokens it emitted, even if `max_tokens`
then cuts some of them: this is vLLM's mean acceptance length.
"""

from __future__ import annotations

import importlib
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

from benchmarks.harness.engine import Engine, Request
from benchmarks.harness.process import EngineProcess, ignore, report_item, report_state

# Imported before an engine is built; takes seconds and reads no model.
IMPORTS = ("vllm.entrypoints.llm",)
_WARM_UP_TOKENS = 24


@dataclass
class Completion:
    """One finished request; `emitted` and `verified` have an entry per forward."""

    name: str
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    emitted: list[int] = field(default_factory=list)
    verified: list[int] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)


@dataclass
class Run:
    completions: list[Completion] = field(default_factory=list)
    decode_s: float = 0.0
    probed: Any = None


@dataclass(frozen=True)
class Count:
    tokens: int
    forwards: int
    verified: int

    @property
    def tau(self) -> float:
        return self.tokens / max(1, self.forwards)

    @property
    def mean_verified(self) -> float:
        """Draft tokens (nodes) verified per forward of a request."""
        return self.verified / max(1, self.forwards)


def count(completions: Iterable[Completion]) -> Count:
    done = list(completions)
    return Count(
        sum(sum(c.emitted) for c in done),
        sum(len(c.emitted) for c in done),
        sum(sum(c.verified) for c in done),
    )


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Where two texts first differ, or None."""
    for at, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return at
    return None if len(one) == len(other) else min(len(one), len(other))


def run_engine(
    engine: Engine, requests: list[Request], progress: Callable[[str], None] = ignore
) -> Run:
    """Decode `requests` in a new process. `progress` is called a few times a second.

    Raises EngineError: the engine failed to start or to decode.
    """
    with engine_of(engine, Decoder, progress) as process:
        process.call("decode", requests)
        return process.answer(progress)


@contextmanager
def engine_of(
    engine: Engine, factory: Any, progress: Callable[[str], None] = ignore
) -> Iterator[EngineProcess]:
    """A process with a started engine. Raises EngineError: it does not start."""
    with begun(engine, factory) as process:
        wait_until_started(process, progress)
        yield process


@contextmanager
def begun(engine: Engine, factory: Any) -> Iterator[EngineProcess]:
    """A process that is starting an engine, so that several can start side by side."""
    with tempfile.TemporaryDirectory(prefix="bastion-") as folder:
        log = Path(folder) / "engine.log"
        process = EngineProcess(log, engine.variables(), IMPORTS, paths=engine.paths())
        try:
            process.start(factory, engine)
            yield process
        finally:
            process.close()


def wait_until_started(process: EngineProcess, progress: Callable[[str], None] = ignore) -> float:
    """Wait for what `begun` began. Returns the seconds of the start, without its imports.

    Raises EngineError: the engine does not start.
    """
    process.answer(progress)  # its imports
    return process.answer(progress)


def build(engine: Engine) -> Any:
    """The engine's `LLM`, in this process."""
    from vllm import LLM
    from vllm.platforms import current_platform

    method = (engine.speculative or {}).get("method", "bastion")
    second_runner = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
    if method != "bastion" and second_runner and current_platform.is_cpu():
        importlib.import_module("benchmarks.other_methods")
    return LLM(**engine.arguments())


class Decoder:
    def __init__(self, engine: Engine) -> None:
        self._timed = engine.timed
        self._llm = build(engine)
        self._collect = None if engine.probe is None else resolve_name(engine.probe)(self._llm)

    def decode(self, requests: list[Request], stream: bool = False) -> Run:
        """Decode all requests and report progress in tokens.

        stream: send (index of a request, new token ids) to the caller's `items` callback.
        """
        llm, result = self._llm, Run([Completion(request.name) for request in requests])
        if self._timed:  # touch memory and load code
            report_state("warming up")
            first = Request("warm-up", requests[0].prompt, _WARM_UP_TOKENS)
            llm.generate([first.vllm_prompt()], first.sampling_params())
            llm.request_counter.reset()
        total, emitted = sum(request.max_tokens for request in requests), 0

        def note(emissions: list[Emission]) -> None:
            nonlocal emitted
            for request_id, tokens, verified, ends_prompt in emissions:
                emitted += len(tokens)
                index = request_index(request_id)
                if stream:
                    report_item((index, [int(token) for token in tokens]))
                if not ends_prompt:
                    result.completions[index].emitted.append(len(tokens))
                    result.completions[index].verified.append(verified)
            report_state(f"decoding, {min(emitted, total)} of {total} tokens")

        watch_steps(engine_core(llm).scheduler, note)
        begin = time.perf_counter()
        if requests:
            params = [request.sampling_params() for request in requests]
            prompts = [request.vllm_prompt() for request in requests]
            outputs = llm.generate(prompts, params, use_tqdm=False)
            for completion, output in zip(result.completions, outputs, strict=True):
                completion.token_ids = list(output.outputs[0].token_ids)
                completion.text = output.outputs[0].text
                completion.prompt_ids = list(output.prompt_token_ids)
        result.decode_s = time.perf_counter() - begin
        if self._collect is not None:
            result.probed = self._collect()
        return result


def engine_core(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core


def model_runner(llm: Any) -> Any:
    return engine_core(llm).model_executor.driver_worker.worker.model_runner


def request_index(request_id: str) -> int:
    """Index of a request in `LLM.generate`'s list; vLLM names requests `0-...`, `1-...`."""
    return int(request_id.split("-")[0])


def reported_nodes(output: Any) -> dict[str, int] | None:
    """Verified nodes by request in bastion's report of a step, or None without a report.

    Reads `vllm_bastion.attached.StepReport` without importing it, because engines without the
    plugin run this too.
    """
    report = getattr(output, "bastion", None)
    return None if report is None else report.num_verified


class Emission(NamedTuple):
    """What a step emitted for a request, and how many nodes it verified."""

    request_id: str
    tokens: list[int]
    verified: int
    ends_prompt: bool


def watch_steps(scheduler: Any, note: Callable[[list[Emission]], None]) -> None:
    """Call `note` for each step, where the scheduler receives it; parts of prompts emit nothing."""
    update = scheduler.update_from_output
    prefilled: set[str] = set()

    def update_from_output(scheduled: Any, output: Any) -> Any:
        nodes, found = reported_nodes(output), []
        for name, tokens in zip(output.req_ids, output.sampled_token_ids or (), strict=False):
            if len(tokens):
                drafts = len(scheduled.scheduled_spec_decode_tokens.get(name, ()))
                verified = drafts if nodes is None else nodes.get(name, 0)
                found.append(Emission(name, tokens, verified, name not in prefilled))
                prefilled.add(name)
        note(found)
        return update(scheduled, output)

    scheduler.update_from_output = update_from_output


def keep_busy(
    engine: Any,
    requests: Iterable[tuple[str, Request]],
    concurrency: int,
    begun: Callable[[str], None] = ignore,
) -> Iterator[Any]:
    """Decode named requests, `concurrency` at a time, and yield each step's outputs.

    begun: called with a name just before the engine gets the request.
    """
    waiting = deque(requests)
    while waiting or engine.has_unfinished_requests():
        while waiting and engine.get_num_unfinished_requests() < concurrency:
            name, request = waiting.popleft()
            begun(name)
            engine.add_request(name, request.vllm_prompt(), request.sampling_params())
        yield engine.step()
