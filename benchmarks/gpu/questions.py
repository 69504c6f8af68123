# SPDX-License-Identifier: Apache-2.0
"""The questions, in the order in which they are asked."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks import ROOT
from benchmarks.gpu.engines import Engines, held_out, noise, recorded
from benchmarks.harness.process import report_item


@dataclass(frozen=True)
class Job:
    """A question's task. `known`: names of the parts that earlier calls have answered."""

    small: bool = False
    known: frozenset[str] = frozenset()
    tell: Callable[[dict[str, Any]], None] = report_item

    def note(self, part: str, **values: Any) -> None:
        """Tell a part of the answer; it is written at once."""
        self.tell({"part": part, **values})

    def lacks(self, parts: Iterable[str]) -> list[str]:
        return [part for part in parts if part not in self.known]


def ask(question: Callable[[Job], None], small: bool, known: frozenset[str]) -> None:
    """Entry point of a question's process."""
    os.chdir(ROOT)
    os.environ.pop("TRITON_INTERPRET", None)
    question(Job(small, known))


def trace(engines: Engines, job: Job) -> None:
    """Steady steps of each mode at each load, without and with prompts that join."""
    from benchmarks.gpu.trace import name_parts, steady_steps

    loads, steps, most = ((1, 2), 4, 200) if job.small else (tuple(engines.loads), 30, 700)
    parts = {
        f"{mode}, {n} requests{', prompts join' * joins}": (mode, n, joins)
        for mode in engines.modes
        for n in loads
        for joins in (False, True)
    }
    if not job.lacks(parts):
        return
    started = engines.start(job.small)
    job.note("starts", **{mode: seconds for mode, (_, seconds) in started.items()})
    for llm, _ in started.values():
        name_parts(llm)
    for part in job.lacks(parts):
        mode, n, joins = parts[part]
        prompts = noise(8, 2, length=60 if job.small else 300) if joins else []
        given = started[mode][0], held_out(n, most), prompts, steps
        job.note(part, **steady_steps(*given, on_device=not job.small))


def decode(engines: Engines, job: Job) -> None:
    """Every part in each mode, back and forth, after a block of each that is not told."""
    import torch

    from benchmarks.harness.driver import Driver

    requests = engines.parts(job.small)
    if not job.lacks(requests):
        return
    started = engines.start(job.small)
    drivers = {mode: Driver(llm) for mode, (llm, _) in started.items()}
    memory = {"reserved_gib": torch.cuda.max_memory_reserved() / 2**30}
    job.note("starts", **{mode: seconds for mode, (_, seconds) in started.items()}, **memory)
    for part in job.lacks(requests):
        at_once, plain = int(part.split()[0]), list[list[int]]()
        if not job.small:
            for driver in drivers.values():  # touch memory and load code
                driver.drive(requests[part][: 2 * at_once], at_once)
        blocks = []
        for mode in engines.modes if job.small else [*engines.modes, *reversed(engines.modes)]:
            found = drivers[mode].drive(requests[part], at_once)
            plain = plain or [one.token_ids for one in found]
            sums = {
                name: sum(getattr(one, name) for one in found)
                for name in ("emitted", "forwards", "verified", "steps", "step_ms", "draft_ms")
            }
            seconds = max(one.end_s for one in found) - min(one.begin_s for one in found)
            equal = sum(a == b.token_ids for a, b in zip(plain, found, strict=True))
            sums |= {"tokens": sum(len(one.token_ids) for one in found), "equal": equal}
            blocks.append({"mode": mode, "seconds": seconds, "replies": len(found), **sums})
        job.note(part, blocks=blocks)


def tokens(job: Job) -> None:
    """End-to-end tests of tokens against plain decoding that no earlier call ran."""
    import pytest

    class Outcomes:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.when == "call" or report.outcome != "passed":
                text = "\n".join(re.findall(r"^E .*", report.longreprtext, re.M))[-2000:]
                job.note(report.nodeid, outcome=report.outcome, text=text)

    capture = "tests/e2e/test_capture.py::test_full_graphs_capture_the_mask"
    chosen = [capture] if job.small else ["tests/e2e/test_lossless.py", capture]
    chosen += [f"--deselect={name}" for name in job.known]
    only = ["-m", "not slow", "-k", "not sync or async or capture", "-v"]
    status = pytest.main([*only, *chosen], plugins=[Outcomes()])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"pytest ended with {status!r}")


def ops(job: Job) -> None:
    """Cases of `benchmarks.ops` that have a bar, attention by size of heads, and lookup."""
    import torch

    from benchmarks.ops.on_gpu import gpu_cases
    from benchmarks.ops.sizes import QWEN3_8B
    from benchmarks.ops.sizes import SMALL as FEW
    from benchmarks.ops.timing import copy_speed, run_entry, time_graphs

    cases = {
        one.name: one
        for one in gpu_cases(FEW if job.small else QWEN3_8B)
        if one.bar or one.op in ("heads", "find_ngram")
    }
    replays = 2 if job.small else 50
    ceiling = copy_speed(replays, 2**12 if job.small else 2**30)
    for name in job.lacks(cases):
        torch.cuda.empty_cache()
        row = run_entry(cases[name], ceiling, partial(time_graphs, replays=replays))
        print(row.line(), flush=True)
        job.note(name, **row.as_json())


@dataclass(frozen=True)
class Question:
    """One question, asked with a `Job`.

    Args:
        title: the question; `decides`: what its answer decides.
        needs_s: expected seconds, an estimate; it is not begun with less than half of that left.
        limit_s: it is interrupted after so long.
    """

    name: str
    title: str
    decides: str
    needs_s: float
    limit_s: float
    ask: Callable[[Job], None]


_BEST = "dflash 15 adaptive"  # vLLM's chain, sized by its confidence
_OURS = "bastion lookup=false"
_FIXED = "bastion budget=16 lookup=false"
ENGINES = {
    "trace": Engines(
        "4B", ("plain", _BEST, _FIXED), {1: 1, 4: 4, 16: 16}, held_out, length=1024
    ),
    "real": Engines(
        "smollm2-4B",
        ("plain", "dflash 7 adaptive", "bastion budget=8 lookup=false", _OURS, "bastion"),
        {1: 2, 4: 4, 16: 8, 64: 16}, recorded, tokens=128, length=1024, temperatures=(0, 1),
    ),
    "adaptive": Engines(
        "4B", ("plain", _BEST, _FIXED, "bastion budget=64 lookup=false", _OURS),
        {1: 6, 4: 12, 16: 48, 64: 128}, held_out, temperatures=(0, 1),
    ),
    "experts": Engines(
        "experts", ("plain", "bastion"), {1: 2, 16: 32}, noise, tokens=48, length=512
    ),
}  # fmt: skip


def _decode(name: str) -> Callable[[Job], None]:
    return partial(decode, ENGINES[name])


QUESTIONS = (
    Question("trace", "What do device and host do in a step of the 4B shape?",
        "which work of the host to remove next: the device's gaps by what the host did in them",
        220, 300, partial(trace, ENGINES["trace"])),
    Question("real", "Do trees pay with a real chat model on real text, and do n-gram drafts?",
        "README's GPU table, and whether lookup may stay on by default on a GPU",
        400, 560, _decode("real")),
    Question("tokens", "Are the tokens plain decoding's, with graphs and asynchronous scheduling?",
        "whether any time here is worth anything", 140, 150, tokens),
    Question("adaptive", "Does the adaptive budget reach the best fixed one at the 4B shape?",
        "whether the budget's costs are right", 330, 420, _decode("adaptive")),
    Question("experts", "Does a mixture of experts of eight layers lose to plain decoding?",
        "whether the gate closes in time where rows are dear", 170, 220, _decode("experts")),
    Question("ops", "Which ops miss their bars?",
        "which kernels to tune", 80, 120, ops),
)  # fmt: skip
