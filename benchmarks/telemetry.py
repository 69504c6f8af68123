# SPDX-License-Identifier: Apache-2.0
"""What recording costs: blocks of steps with and without it, in turns, in one engine.

    python -m benchmarks.telemetry [--pair FOLDER --dtype bfloat16] [--rounds 300] [--steps 12]

Modes:

    off        as with VLLM_BASTION_TELEMETRY=0
    metrics    steps are recorded, and their sums sent and written to Prometheus
    page       the same with VLLM_BASTION_PAGE=1, and nobody looks
    watched    the same, and somebody looks: the worker is asked once a second

A round has a block of every mode, in an order drawn anew. A step is compared with the median step
of its size in any mode, a mode's block with the round's block without recording. Steps with prompts
do not count, and a step that something else interrupted counts as a quarter longer than the round's
median. Everything runs in one process, the front end too, whose part a server does elsewhere. It
needs an idle machine.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks import TINY
from benchmarks.harness.decoder import engine_core, model_runner, reported_nodes
from benchmarks.harness.engine import Engine, Request, bastion
from benchmarks.harness.process import EngineProcess, report_state
from benchmarks.prompts import load_prompts
from benchmarks.provenance import provenance

OFF, METRICS, PAGE, WATCHED = MODES = ("off", "metrics", "page", "watched")
# Steps at a block's start that are not timed: the switch, and code that is no longer in a cache.
_SETTLE = 2
# Steps of a size without which its median is not known.
_FEWEST = 8
# What a step counts as at most, over its round's median: more is an interruption.
_MOST = 1.25
_POLL_S = 1.0


@dataclass(frozen=True)
class Recording(Engine):
    """An engine with vLLM's statistics, ours and the page."""

    def variables(self) -> dict[str, str]:
        """Environment variables to add to the user's."""
        own = {"VLLM_BASTION_TELEMETRY": "1", "VLLM_BASTION_PAGE": "1"}
        return {**super().variables(), **own}

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of vLLM's `LLM`: every step is scheduled after the one before it."""
        own = {"disable_log_stats": False, "async_scheduling": False}
        return {**super().arguments(), **own}


@dataclass
class Block:
    """Steps in a row in one mode. A step's size is (requests, nodes)."""

    mode: str
    sizes: list[tuple[int, int]]
    # of each
    seconds: list[float]


class Alternating:
    """An engine in this process whose recording is switched between steps."""

    def __init__(self, engine: Engine, requests: list[Request]) -> None:
        from vllm import LLM

        from vllm_bastion.engine.runtime import runtime_of
        from vllm_bastion.hooks.telemetry import BastionStatLogger
        from vllm_bastion.telemetry.seen_trees import SeenTrees

        self._llm = LLM(**engine.arguments())
        self._engine = self._llm.llm_engine
        self._at_once, self._requests, self._sent = engine.max_num_seqs, requests, 0
        self._runtime = runtime_of(model_runner(self._llm).vllm_config)
        self._recorder = self._runtime.recorder
        self._seen = {PAGE: SeenTrees(), WATCHED: SeenTrees()}
        self._loggers = self._engine.logger_manager.stat_loggers
        self._all_loggers = list(self._loggers)
        self._others = [one for one in self._loggers if not isinstance(one, BastionStatLogger)]
        # Seconds of recorded blocks: sums are sent, and the page asks, by this clock.
        self._recorded_s = self._next_poll = 0.0
        self._size: tuple[int, int] | None = None
        self._watch_sizes()

    def _watch_sizes(self) -> None:
        scheduler = engine_core(self._llm).scheduler
        update = scheduler.update_from_output

        def update_from_output(scheduled: Any, output: Any) -> Any:
            tokens, drafts = scheduled.num_scheduled_tokens, scheduled.scheduled_spec_decode_tokens
            decodes = sum(tokens.values()) == len(tokens) + sum(map(len, drafts.values()))
            nodes = sum((reported_nodes(output) or {}).values())
            self._size = (len(tokens), nodes) if decodes else None
            return update(scheduled, output)

        scheduler.update_from_output = update_from_output

    def _switch(self, mode: str) -> None:
        runtime, records = self._runtime, mode != OFF
        runtime.recorder = self._recorder if records else None
        if runtime.controller is not None:
            runtime.controller.on_step = self._recorder.timed if records else None
        runtime.seen = self._seen.get(mode)
        self._loggers[:] = self._all_loggers if records else self._others

    def _step(self, watched: bool) -> None:
        self._engine.step()
        if watched and self._recorded_s >= self._next_poll:
            self._next_poll = self._recorded_s + _POLL_S
            self._engine.collective_rpc("bastion_snapshot")

    def _fill(self) -> None:
        while self._engine.get_num_unfinished_requests() < self._at_once:
            request = self._requests[self._sent % len(self._requests)]
            self._sent += 1
            params = request.sampling_params()
            self._engine.add_request(str(self._sent), request.vllm_prompt(), params)

    def block(self, mode: str, steps: int) -> Block:
        """Decode some steps in a mode, and time each."""
        self._switch(mode)
        block = Block(mode, [], [])
        done = -_SETTLE
        while done < steps:
            self._fill()
            begin = time.perf_counter()
            self._step(mode == WATCHED)
            seconds = time.perf_counter() - begin
            if mode != OFF:
                self._recorded_s += seconds
            if self._size is not None:
                done += 1
                if done > 0:
                    block.sizes.append(self._size)
                    block.seconds.append(seconds)
        return block

    def measure(self, modes: Sequence[str], rounds: int, steps: int) -> list[Block]:
        """Decode a block of every mode in each round."""
        from vllm_bastion.carriers import SchedulerState

        draw = random.Random(0)
        self.block(METRICS, steps)  # touch memory and load code
        state = SchedulerState.of(engine_core(self._llm).scheduler)
        assert state.collector is not None
        state.collector._clock = lambda: self._recorded_s
        blocks = []
        for number in range(rounds):
            report_state(f"round {number + 1} of {rounds}")
            for mode in draw.sample(modes, len(modes)):
                blocks.append(self.block(mode, steps))
        return blocks


def overheads(blocks: Sequence[Block], modes: Sequence[str]) -> dict[str, tuple[float, ...]]:
    """Of each mode but off: (mean ratio to off, 95% interval, rounds).

    Args:
        blocks: a round after the other, a block of every mode in each.
    """
    of_size = defaultdict(list)
    for block in blocks:
        for size, amount in zip(block.sizes, block.seconds, strict=True):
            of_size[size].append(amount)
    expected = {size: median(seen) for size, seen in of_size.items() if len(seen) >= _FEWEST}
    relative: dict[str, list[float]] = {mode: [] for mode in modes}
    for begin in range(0, len(blocks), len(modes)):
        # [steps] time over the usual one, of each block of the round
        ratios = {
            block.mode: np.array(
                [
                    amount / expected[size]
                    for size, amount in zip(block.sizes, block.seconds, strict=True)
                    if size in expected
                ]
            )
            for block in blocks[begin : begin + len(modes)]
        }
        if all(map(len, ratios.values())):
            most = _MOST * np.median(np.concatenate([*ratios.values()]))
            for mode, of_steps in ratios.items():
                relative[mode].append(float(np.log(np.minimum(of_steps, most).mean())))
    draw = np.random.default_rng(0)
    out = {}
    for mode in modes:
        if mode != OFF:
            pairs = np.array(relative[mode]) - relative[OFF]
            means = draw.choice(pairs, (4000, len(pairs))).mean(1)
            low, high = np.quantile(means, [0.025, 0.975])
            out[mode] = (*np.exp([pairs.mean(), low, high]).tolist(), len(pairs))
    return out


def _run(engine: Engine, requests: list[Request], *work: Any) -> Any:
    with tempfile.TemporaryDirectory(prefix="bastion-") as folder:
        process = EngineProcess(Path(folder) / "engine.log", engine.variables())
        try:
            process.start(Alternating, engine, requests)
            process.answer()
            process.call("measure", *work)
            return process.answer()
        finally:
            process.close()


def main() -> int:
    """Print what each mode costs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pair", type=Path, default=TINY, help="folder with target and drafter")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--modes", nargs="+", choices=MODES[1:], default=MODES[1:])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--steps", type=int, default=12, help="of a block")
    parser.add_argument("--tokens", type=int, default=200, help="of a request")
    parser.add_argument("--requests", type=int, default=1, help="decoded at a time")
    parser.add_argument("--nodes", type=int, default=63)
    parser.add_argument("--budget", default="adaptive", help="or a number: then steps are the same")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    budget = args.budget if args.budget == "adaptive" else int(args.budget)
    engine = Recording(
        bastion(args.pair / "drafter", args.nodes, budget),
        target=args.pair / "target",
        max_num_seqs=args.requests,
        dtype=args.dtype,
        timed=True,
    )
    prompts = load_prompts(TINY / "prompts.jsonl")
    requests = [Request(row["id"], row["prompt"], args.tokens) for row in prompts]
    modes = [OFF, *args.modes]
    blocks = _run(engine, requests, modes, args.rounds, args.steps)
    result = overheads(blocks, modes)
    for mode, (mean, low, high, rounds) in result.items():
        interval = f"[{100 * (low - 1):+.2f}, {100 * (high - 1):+.2f}]"
        print(f"{mode:8}{100 * (mean - 1):+.2f}% of a step {interval}, {rounds:.0f} rounds")
    if args.out is not None:
        given = {"provenance": provenance(), "overheads": result}
        args.out.write_text(json.dumps(given, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
