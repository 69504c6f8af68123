# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.rehearsal host`: what the host does in a step, with launches that do nothing.

Calls, of Python and C functions, of the engine core and the worker in a steady step, and launches
outside graphs. They have no noise. With `--ms` also milliseconds, on a machine that is idle.

Plain steps, trees, or n-gram drafts alone are forced, with as many nodes in every step; see
`forced`. In the last column a prompt of 300 tokens joins 16 requests: the step that computes it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from statistics import mean, median
from typing import Any

from tests.rehearsal.cases import TINY
from tests.rehearsal.device import FakeDriver
from tests.rehearsal.forced import Steps
from vllm_bastion.scheduler.gate import Arm

_WARM_UP, _COUNTED, _TIMED, _LOADS = 30, 48, 15, (1, 16, 64)
_JOINED, _PROMPT = 16, 300
_DRAFTER = {"model": str(TINY / "drafter")}
_NO_LOOKUP = {"method": "bastion", "bastion_lookup": False, **_DRAFTER}
_ENGINES: dict[str, tuple[dict[str, Any] | None, Arm]] = {
    "plain": (None, Arm.PLAIN),
    "chain": ({"method": "dflash", "num_speculative_tokens": 15, **_DRAFTER}, Arm.TREE),
    "bastion, plain steps": (_NO_LOOKUP, Arm.PLAIN),
    "bastion, trees": (_NO_LOOKUP, Arm.TREE),
    "bastion, trees, lookup": ({"method": "bastion", **_DRAFTER}, Arm.TREE),
    "bastion, n-gram drafts alone": ({"method": "bastion", **_DRAFTER}, Arm.NGRAM),
}


def measure(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.rehearsal host", description=__doc__)
    parser.add_argument("--only", choices=_ENGINES, help="in this process")
    parser.add_argument("--ms", action="store_true", help="time steps, too")
    parser.add_argument("--by-function", type=int, default=0, help="functions to list, with --only")
    given = parser.parse_args(arguments)
    if given.only:
        speculative, arm = _ENGINES[given.only]
        for cell in _run(speculative, Steps(arm), given.ms, given.by_function):
            print(f"cell {cell}", flush=True)
        os._exit(0)  # vLLM's own way out takes long
    failed = 0
    heads = [f"{n} request{'s' * (n > 1)}" for n in _LOADS] + [f"a prompt joins {_JOINED}"]
    print(f"| calls / launches{' / ms' * given.ms} a step | {' | '.join(heads)} |")
    print("|---" * (1 + len(heads)) + "|", flush=True)
    for name in _ENGINES:
        command = [sys.executable, "-m", "tests.rehearsal", "host", "--only", name]
        done = subprocess.run(command + ["--ms"] * given.ms, capture_output=True, text=True)
        cells = [line[5:] for line in done.stdout.splitlines() if line.startswith("cell ")]
        failed += len(cells) != len(heads)
        print(f"| {name} | {' | '.join(cells) or done.stderr[-500:]} |", flush=True)
    return int(failed > 0)


class Counter:
    """Counts calls of functions, and launches, in the steps of an engine."""

    def __init__(self, engine: Any) -> None:
        self._step, self._driver = engine.engine_core.get_output, FakeDriver()
        engine.engine_core.get_output = self._counted
        self.on = False
        self.calls: list[int] = []
        self.launches: list[int] = []
        self.by_function: dict[Any, int] = {}

    def _counted(self) -> Any:
        if not self.on:
            return self._step()
        by_function, before = self.by_function, sum(self.by_function.values())

        def count(frame: Any, event: str, function: Any) -> None:
            if event == "call" or event == "c_call":
                key = frame.f_code if event == "call" else function.__qualname__
                by_function[key] = by_function.get(key, 0) + 1

        self._driver.begin_step()
        sys.setprofile(count)
        try:
            return self._step()
        finally:
            sys.setprofile(None)
            self.calls.append(sum(by_function.values()) - before)
            self.launches.append(self._driver.counters().get("launch", 0))

    def begin(self) -> None:
        self.on = True
        self.calls, self.launches, self.by_function = [], [], {}

    def graphs(self) -> int:
        """How many of the steps replayed a graph of the target."""
        named = ((getattr(key, "co_qualname", key), n) for key, n in self.by_function.items())
        return sum(n for name, n in named if name == "ModelCudaGraphManager.run_fullgraph")

    def list_functions(self, most: int) -> None:
        steps = len(self.calls)
        for key, count in sorted(self.by_function.items(), key=lambda item: -item[1])[:most]:
            name = key if isinstance(key, str) else f"{key.co_filename[-50:]}:{key.co_qualname}"
            print(f"{count / steps:8.1f} {name}")


def _run(
    speculative: dict[str, Any] | None, steps: Steps, timed: bool, listed: int
) -> Iterator[str]:
    """A cell for each load, and one for the prompt."""
    from vllm import EngineArgs, SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine

    steps.install()
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=str(TINY / "target"),
            dtype="bfloat16",
            max_num_seqs=max(_LOADS),
            max_model_len=2048,
            gpu_memory_utilization=0.05,
            compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
            speculative_config=speculative,
        )
    )
    counter = Counter(engine)
    params = SamplingParams(temperature=0.0, max_tokens=1900, ignore_eos=True, detokenize=False)

    def add(name: str, tokens: int) -> None:
        start = sum(map(ord, name))
        prompt = {"prompt_token_ids": [5 + (7 * start + j) % 200 for j in range(tokens)]}
        engine.add_request(name, prompt, params)

    for load in _LOADS:
        names = [f"{load}-{i}" for i in range(load)]
        for name in names:
            add(name, 24)
        for _ in range(_WARM_UP):
            engine.step()
        counter.begin()
        for _ in range(_COUNTED):
            engine.step()
        counter.on = False
        cell = f"{mean(counter.calls):,.0f} / {mean(counter.launches):.1f}"
        if listed:
            print(f"{load} requests")
            counter.list_functions(listed)
        if timed:
            cell += f" / {median(_ms(engine, 10) for _ in range(_TIMED)):.2f}"
        yield cell
        if load == _JOINED:
            joined = _join(engine, counter, add, timed, listed)
        engine.abort_request(names)
        while engine.has_unfinished_requests():
            engine.step()
    yield joined


def _ms(engine: Any, steps: int = 1) -> float:
    """The mean of some steps. With async scheduling a step may wait for the one before it."""
    begin = time.perf_counter()
    for _ in range(steps):
        engine.step()
    return (time.perf_counter() - begin) * 1e3 / steps


def _join(engine: Any, counter: Counter, add: Any, timed: bool, listed: int) -> str:
    """The cell of the step in which a prompt joins, the first one after it was added."""
    counter.begin()
    counter.on = False
    times: list[float] = []
    for i in range(8):
        for part in ("calls", "ms") if timed else ("calls",):
            name = f"{part}-{i}"
            add(name, _PROMPT)
            counter.on = part == "calls"
            times += [_ms(engine)] * (part == "ms")
            counter.on = False
            for _ in range(3):
                engine.step()
            engine.abort_request([name])
            for _ in range(4):
                engine.step()
    if listed:
        print("a prompt joins")
        counter.list_functions(listed)
    graph = "in a graph" if counter.graphs() == len(counter.calls) else "no graph"
    cell = f"{median(counter.calls):,.0f} / {median(counter.launches):.0f}"
    return cell + (f" / {median(times):.2f}" if timed else "") + f", {graph}"
