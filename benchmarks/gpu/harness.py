# SPDX-License-Identifier: Apache-2.0
"""Time ops under CUDA-graph replay, against the machine's own ceilings and FlashAttention 3.

A case is a check and a list of calls, which are timed only if the check passes. Five or more calls
are captured one after another into one graph. This excludes host time, shares the start of a replay
among the calls, and lets each call use its own data (a layer's cache, say) that the calls before it
have evicted from the L2 cache. The time of a call is a replay's time divided by the number of
calls; it includes gaps between kernels, as in a model.

A rival does the same work by other means. Each is checked and timed too, and the fastest one judges
the bar on FlashAttention 3.
"""

from __future__ import annotations

import math
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.device import sm_clock

Call = Callable[[], object]

# Clocks drop during the seconds of a check on the host and need this long to recover.
WARM_UP_S = 0.3
# At most this long for all replays of one measurement: a slow rival gets fewer.
MEASURED_S = 1.0
LEAST_REPLAYS = 10
# How long the device is kept busy while its clock is read.
CLOCK_READ_S = 0.03
US, OF_COPY, FA3 = "us", "of copy", "x FlashAttention 3"


@dataclass(frozen=True)
class Timing:
    """Microseconds per call over the replays, and the clock they ran at."""

    median: float
    p20: float
    p80: float
    sm_mhz: int | None = None


@dataclass(frozen=True)
class Ceilings:
    """What plain PyTorch reached on this machine in this run."""

    # bytes read and written per second by a large copy, GB/s
    copy: float
    # a large bf16 matrix product, TFLOP/s
    matmul: float


@dataclass(frozen=True)
class Bar:
    """The limit of a case; `kind` is US, OF_COPY or FA3 (times the fastest rival's time)."""

    kind: str
    limit: float


@dataclass(frozen=True)
class Rival:
    """Another way to do a case's work. `build` returns its calls and its check, and may fail."""

    name: str
    build: Callable[[], tuple[Sequence[Call], Call]]


@dataclass
class Case:
    """One op at one shape, with its buffers."""

    check: Call
    calls: Sequence[Call]
    # per call
    bytes_moved: int = 0
    flops: int = 0
    # where a call finds its data: "hot" in the L2 cache, or "cold" and why
    memory: str = "hot"
    rivals: Sequence[Rival] = ()


@dataclass(frozen=True)
class Entry:
    """A case that is built when it runs: cases take too much memory to exist together."""

    op: str
    name: str
    make: Callable[[], Case]
    bar: Bar | None = None


@dataclass
class Row:
    """A result: without a timing if something failed."""

    name: str
    bar: Bar | None = None
    # "build", "check" or "timing"
    failed: str = ""
    error: str = ""
    traceback: str = ""
    timing: Timing | None = None
    calls: int | None = None
    memory: str = ""
    gb_per_s: float | None = None
    tflop_per_s: float | None = None
    # of the ceiling that the case is closer to
    fraction: float | None = None
    # the fastest rival
    judge: str = ""
    judge_timing: Timing | None = None
    # name and timing, or error, of every rival
    rivals: list[dict[str, Any]] = field(default_factory=list)
    # measured over allowed: met if <= 1
    bar_ratio: float | None = None
    verdict: str = ""
    seconds: float | None = None

    def as_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value not in (None, "", [])}


Timer = Callable[[Sequence[Call], int], Timing]


def quantiles(samples: Sequence[float]) -> Timing:
    """Median, 20th and 80th percentile, by linear interpolation."""
    if len(samples) == 1:
        return Timing(samples[0], samples[0], samples[0])
    cuts = statistics.quantiles(samples, n=10, method="inclusive")
    return Timing(statistics.median(samples), cuts[1], cuts[7])


def warm_up(graph: torch.cuda.CUDAGraph) -> float:
    """Replay for WARM_UP_S. Returns the seconds per replay."""
    done, batch, start = 0, 1, time.perf_counter()
    while done == 0 or time.perf_counter() - start < WARM_UP_S:
        for _ in range(batch):
            graph.replay()
        torch.cuda.synchronize()
        done += batch
        batch = min(2 * batch, 32)
    return (time.perf_counter() - start) / done


def time_calls(calls: Sequence[Call], replays: int) -> Timing:
    """Time a call by replaying a graph of all of them; needs a CUDA device."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compile, and make one-time allocations
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    each = warm_up(graph)
    replays = max(min(replays, int(MEASURED_S / each)), min(replays, LEAST_REPLAYS))
    timed = partial(torch.cuda.Event, enable_timing=True)
    events = [(timed(), timed()) for _ in range(replays)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    for _ in range(math.ceil(CLOCK_READ_S / each)):
        graph.replay()
    mhz = sm_clock()
    torch.cuda.synchronize()
    samples = [1e3 * start.elapsed_time(end) / len(calls) for start, end in events]
    return replace(quantiles(samples), sm_mhz=mhz)


def measure_ceilings(replays: int, size: int = 8192) -> Ceilings:
    """Time a large copy (2 GiB) and a square bf16 product of random matrices, of `size` rows."""
    source = torch.randn(8 * size**2, device="cuda")
    copy = time_calls([partial(torch.empty_like(source).copy_, source)], replays)
    moved = 2 * source.nbytes
    a = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    product = time_calls([partial(torch.mm, a, b, out=torch.empty_like(a))], replays)
    return Ceilings(1e-3 * moved / copy.median, 1e-6 * 2 * size**3 / product.median)


def run_entry(entry: Entry, ceilings: Ceilings, replays: int, timer: Timer = time_calls) -> Row:
    """Build, check and time a case. If anything fails, the row has an error and no timing."""
    row = Row(entry.name, bar=entry.bar)
    start, stage = time.perf_counter(), "build"
    try:
        case = entry.make()
        stage = "check"
        case.check()
        stage = "timing"
        row.timing = timer(case.calls, replays)
    except Exception as error:  # run the other cases in any case
        row.failed, row.error = stage, reason(error)
        row.traceback = traceback.format_exc()[-3000:]
    else:
        row.calls, row.memory = len(case.calls), case.memory
        _rate(row, case, ceilings)
        for rival in case.rivals:
            row.rivals.append(_run_rival(rival, replays, timer))
        _judge(row, ceilings)
    row.seconds = round(time.perf_counter() - start, 2)
    return row


def reason(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}".strip()
    return " ".join(text.split())[:300]


def _run_rival(rival: Rival, replays: int, timer: Timer) -> dict[str, Any]:
    outcome: dict[str, Any] = {"name": rival.name}
    try:
        calls, check = rival.build()
        check()
        outcome["timing"] = timer(calls, replays)
    except Exception as error:  # not every rival supports every shape
        outcome["error"] = reason(error)
    if torch.cuda.is_available():
        calls = check = None  # free its copies of the caches
        torch.cuda.empty_cache()
    return outcome


def _rate(row: Row, case: Case, ceilings: Ceilings) -> None:
    fractions = []
    if case.bytes_moved:
        row.gb_per_s = 1e-3 * case.bytes_moved / row.timing.median
        fractions.append(row.gb_per_s / ceilings.copy)
    if case.flops:
        row.tflop_per_s = 1e-6 * case.flops / row.timing.median
        fractions.append(row.tflop_per_s / ceilings.matmul)
    row.fraction = max(fractions, default=None)


def _judge(row: Row, ceilings: Ceilings) -> None:
    timed = [outcome for outcome in row.rivals if "timing" in outcome]
    if timed:
        best = min(timed, key=lambda outcome: outcome["timing"].median)
        row.judge, row.judge_timing = best["name"], best["timing"]
    if row.bar is None:
        return
    if row.bar.kind == US:
        row.bar_ratio = row.timing.median / row.bar.limit
    elif row.bar.kind == OF_COPY:
        row.bar_ratio = row.bar.limit * ceilings.copy / row.gb_per_s
    elif row.judge_timing is not None:
        row.bar_ratio = row.timing.median / row.judge_timing.median / row.bar.limit
    else:
        row.verdict = f"{'FA3 failed' if row.rivals else 'no FA3'} here: not judged"
        return
    row.verdict = "met" if row.bar_ratio <= 1 else "MISSED"
