# SPDX-License-Identifier: Apache-2.0
"""One engine whose budget is switched between requests, beside others, in this process.

    plain       vLLM without speculation, with the model runner that it chooses: a second engine
    never       this engine, which never drafts: what a plain step costs here
    16          trees of 16 nodes in every step
    adaptive    as a user has it

All but the first are one engine, so they share memory, threads and the machine's moods, which
differ between two starts of one engine by more than two good budgets do. Costs are learned in all
of them. Decode modes in turns, back and forth. A block's time includes its prompts. Use
several times as many prompts as run at a time: once the queue is empty, the batch shrinks.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from benchmarks.harness.decoder import (
    Emission,
    engine_core,
    keep_busy,
    model_runner,
    watch_steps,
    watch_times,
)
from benchmarks.harness.engine import Engine, Request
from benchmarks.harness.process import report_state
from vllm_bastion.policy.step_size import StepSize

PLAIN, NEVER, ADAPTIVE = "plain", "never", "adaptive"


@dataclass
class Block:
    """All requests of a part, decoded in one way. `nodes` counts those verified."""

    mode: str
    part: str
    concurrency: int
    seconds: float
    steps: int
    nodes: int
    # Steps of single requests after their prompts, and the tokens that these emitted: tau is the
    # ratio of the two.
    forwards: int = 0
    emitted: int = 0
    # Steps in which prompts ended, and those that emitted nothing.
    prompt_steps: int = 0
    idle_steps: int = 0
    # Replies that equal plain decoding's; None without plain decoding.
    equal: int | None = None
    # Steps that the worker timed: [requests, rows, 1 if verified, number, median ms, profile's ms].
    timed: list[list[float]] = field(default_factory=list)


class Switched:
    """Engines in this process, of which one has a budget that is switched between requests.

    Args:
        engine: the one with method "bastion" and an adaptive budget.
        requests: by part.
        others: further engines by mode; default: plain decoding.
    """

    def __init__(
        self,
        engine: Engine,
        requests: dict[str, list[Request]],
        others: dict[str, Engine] | None = None,
    ) -> None:
        from vllm import LLM

        if others is None:
            others = {PLAIN: replace(engine, speculative=None)}
        self.start_s: dict[str, float] = {}
        self._engines: dict[str, Any] = {}
        for mode, one in {**others, ADAPTIVE: engine}.items():
            report_state(f"starting {mode}")
            begin = time.perf_counter()
            llm = LLM(**one.arguments())
            self._engines[mode] = llm.llm_engine
            self.start_s[mode] = time.perf_counter() - begin
            watch_steps(engine_core(llm).scheduler, self._count)
        self._requests, self._sent, self._mode = requests, 0, ADAPTIVE
        self._plain: dict[str, list[list[int]]] = {}
        self._forget()
        self.core, self.runner = engine_core(llm), model_runner(llm)
        manager = self.runner.adaptive_verification
        self._switch_budget(manager)
        self._switch_drafting(manager.runtime.controller)
        self._table = manager.runtime.controller.latency.table
        watch_times(manager.runtime.timer, self._sort_times)

    def _forget(self) -> None:
        self._steps = self._nodes = self._forwards = self._emitted = 0
        self._prompt_steps = self._idle_steps = 0
        self._timed: dict[tuple[int, int, bool], list[tuple[float, float]]] = {}

    def _count(self, emissions: list[Emission]) -> None:
        self._steps += 1
        self._prompt_steps += any(one.ends_prompt for one in emissions)
        self._idle_steps += not emissions
        for one in emissions:
            if not one.ends_prompt:
                self._nodes += one.verified
                self._forwards += 1
                self._emitted += len(one.tokens)

    def _sort_times(self, step: Any) -> None:
        """Sort what the worker times by requests and rows, beside what the profile says."""
        table, reqs, context = self._table, step.num_reqs, step.context_len
        rows = min(step.rows, table.max_rows)
        if step.drafted:
            profile = float(table.cost_ms(reqs, context)[rows])
        else:
            profile = table.plain_ms(reqs, context)
        key = reqs, int(table.padded_rows[rows]), step.verified
        self._timed.setdefault(key, []).append((step.total_ms, profile))

    def _switch_budget(self, manager: Any) -> None:
        choose, observe = manager._choose, manager._observe

        def chosen(slots: np.ndarray, drafts: np.ndarray) -> np.ndarray:
            if self._mode in (ADAPTIVE, NEVER):
                return choose(slots, drafts)
            if manager.lag:  # the device keeps their sum only, and shares it out
                controller, learned = manager.runtime.controller, manager.runtime.controller.size
                controller.size = StepSize()
                controller.size.observe(int(self._mode) * len(slots), len(slots), len(slots))
                number = choose(slots, drafts)
                controller.size = learned
                return number
            choose(slots, drafts)  # its time is part of a step
            limit = manager._max_step_nodes(len(slots)) // len(slots)
            return np.minimum(manager._max_nodes(drafts), min(int(self._mode), limit)).astype(
                np.int32
            )

        def observed(published: Any) -> None:
            if self._mode == ADAPTIVE:
                observe(published)

        manager._choose, manager._observe = chosen, observed

    def _switch_drafting(self, controller: Any) -> None:
        plan = controller.plan

        def planned(batch: Any) -> Any:
            decision = plan(batch)
            if self._mode == ADAPTIVE or decision.replies_end:
                return decision
            return replace(decision, drafts=self._mode != NEVER)

        controller.plan = planned

    def block(self, mode: str, part: str, concurrency: int) -> Block:
        self._mode = mode
        engine = self._engines.get(mode, self._engines[ADAPTIVE])
        self._forget()
        named = [(str(self._sent + i), one) for i, one in enumerate(self._requests[part])]
        self._sent += len(named)
        replies: dict[str, list[int]] = {}
        begin = time.perf_counter()
        for outputs in keep_busy(engine, named, concurrency):
            for output in outputs:
                replies[output.request_id] = list(output.outputs[0].token_ids)
        seconds = time.perf_counter() - begin
        found = [replies[name] for name, _ in named]
        if mode == PLAIN:
            self._plain.setdefault(part, found)
        plain = self._plain.get(part)
        equal = None if plain is None else sum(a == b for a, b in zip(found, plain, strict=True))
        return Block(
            *(mode, part, concurrency, seconds, self._steps, self._nodes, self._forwards),
            *(self._emitted, self._prompt_steps, self._idle_steps, equal, _medians(self._timed)),
        )


def _medians(timed: dict[tuple[int, int, bool], list[tuple[float, float]]]) -> list[list[float]]:
    return [
        [reqs, rows, int(verified), len(times), *(float(x) for x in np.median(times, axis=0))]
        for (reqs, rows, verified), times in sorted(timed.items())
    ]
