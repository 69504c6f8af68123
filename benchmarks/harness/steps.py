# SPDX-License-Identifier: Apache-2.0
"""Look into a running engine, and count its steps.

A *forward* of a request is a step of the engine in which the target emitted tokens for it. The step
that ends the prompt and the token it emits are left out, so plain decoding has tau 1 exactly.
tau = tokens emitted / forwards. A step counts with all the tokens it emitted, even if `max_tokens`
then cuts some of them: this is vLLM's mean acceptance length.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks.harness.engine import Request
from benchmarks.harness.process import ignore


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Where two texts first differ, or None."""
    for at, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return at
    return None if len(one) == len(other) else min(len(one), len(other))


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
