# SPDX-License-Identifier: Apache-2.0
"""A case is a check and a list of calls, which are timed only if the check passes.

A rival does the same work by other means. Each is checked and timed too, and the fastest one judges
the bar on FlashAttention 3.
"""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from benchmarks.ops.device import sm_clock

Call = Callable[[], object]

# Clocks drop during the seconds of a check on the host and need this long to recover.
_WARM_UP_S = 0.3
# At most this long for all replays of one measurement: a slow rival gets fewer.
_MEASURED_S = 1.0
_LEAST_REPLAYS = 10
# How long the device is kept busy while its clock is read.
_CLOCK_READ_S = 0.03
US, OF_COPY, FA3 = "us", "of copy", "x FlashAttention 3"


@dataclass(frozen=True)
class Timing:
    """Microseconds per call over the replays, and the clock they ran at."""

    median: float
    p20: float
    p80: float
    best: float
    sm_mhz: int | None = None


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

    op: str
    name: str
    bar: Bar | None = None
    # "build", "check" or "timing"
    failed: str = ""
    error: str = ""
    timing: Timing | None = None
    gb_per_s: float | None = None
    # the fastest rival, and the errors of others
    judge: str = ""
    judge_timing: Timing | None = None
    rivals: dict[str, str] = field(default_factory=dict)
    # measured over allowed: met if <= 1
    bar_ratio: float | None = None
    verdict: str = ""

    def line(self) -> str:
        """A line of the table on the terminal."""
        if self.timing is None:
            return f"{self.name:44} {self.failed.upper()} FAILED, not timed: {self.error}"
        t, theirs = self.timing, self.judge_timing
        text = f"{self.name:44} {t.median:9.1f} {t.p20:9.1f} {t.p80:9.1f} {t.best:9.1f}"
        text += f" {self.gb_per_s or 0:8.0f} {t.sm_mhz or '?':>5}"
        if theirs is not None:
            ratios = f"{t.median / theirs.median:.2f}x (best {t.best / theirs.best:.2f}x)"
            text += f"  {ratios} {self.judge}: {theirs.median:.1f} us"
        if self.bar is not None:
            measured = "" if self.bar_ratio is None else f"{self.bar_ratio:.2f} "
            text += f"  bar {self.bar.limit:g} {self.bar.kind}: {measured}{self.verdict}"
        return text


# Times groups of calls: the case's own, then each rival's.
Timer = Callable[[Sequence[Sequence[Call]]], list[Timing]]


def quantiles(samples: Sequence[float], sm_mhz: int | None = None) -> Timing:
    """Median, 20th and 80th percentile, by linear interpolation; and the best."""
    return Timing(*map(float, np.percentile(samples, (50, 20, 80, 0))), sm_mhz)


def time_graphs(groups: Sequence[Sequence[Call]], replays: int) -> list[Timing]:
    """Time each group's calls by replays of a graph of all of them; needs a CUDA device."""
    return [_time_graph(calls, replays) for calls in groups]


def _time_graph(calls: Sequence[Call], replays: int) -> Timing:
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
    done, batch, start = 0, 1, time.perf_counter()
    while done == 0 or time.perf_counter() - start < _WARM_UP_S:
        for _ in range(batch):
            graph.replay()
        torch.cuda.synchronize()
        done += batch
        batch = min(2 * batch, 32)
    each = (time.perf_counter() - start) / done
    replays = max(min(replays, int(_MEASURED_S / each)), min(replays, _LEAST_REPLAYS))
    timed = partial(torch.cuda.Event, enable_timing=True)
    events = [(timed(), timed()) for _ in range(replays)]
    for begin, end in events:
        begin.record()
        graph.replay()
        end.record()
    for _ in range(math.ceil(_CLOCK_READ_S / each)):
        graph.replay()
    mhz = sm_clock()
    torch.cuda.synchronize()
    return quantiles([1e3 * a.elapsed_time(b) / len(calls) for a, b in events], mhz)


def copy_speed(replays: int, size: int) -> float:
    """GB/s, read and written, of a copy of `size` bytes in plain PyTorch: the machine's ceiling."""
    source = torch.empty(size, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    (timing,) = time_graphs([[partial(target.copy_, source)] * 2], replays)
    return 2e-3 * source.nbytes / timing.median


def run_entry(entry: Entry, copy_gb_per_s: float, timer: Timer) -> Row:
    """Build, check and time a case. If anything fails, the row has an error and no timing."""
    row = Row(entry.op, entry.name, bar=entry.bar)
    stage = "build"
    try:
        case = entry.make()
        stage = "check"
        case.check()
        rivals = _checked(case.rivals, row)
        stage = "timing"
        row.timing, *timings = timer([case.calls, *rivals.values()])
    except Exception as error:  # run the other cases in any case
        row.failed, row.error = stage, reason(error)
        traceback.print_exc()
    else:
        if case.bytes_moved:
            row.gb_per_s = 1e-3 * case.bytes_moved / row.timing.median
        if timings:
            named = zip(rivals, timings, strict=True)
            row.judge, row.judge_timing = min(named, key=lambda pair: pair[1].median)
        _judge(row, copy_gb_per_s)
    return row


def _checked(rivals: Sequence[Rival], row: Row) -> dict[str, Sequence[Call]]:
    """The calls of those that this machine has and whose results are right."""
    found = {}
    for rival in rivals:
        try:
            calls, check = rival.build()
            check()
            found[rival.name] = calls
        except Exception as error:  # not every rival supports every shape
            row.rivals[rival.name] = reason(error)
    return found


def reason(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}".strip()
    return " ".join(text.split())[:300]


def _judge(row: Row, copy_gb_per_s: float) -> None:
    if row.bar is None:
        return
    if row.bar.kind == US:
        row.bar_ratio = row.timing.median / row.bar.limit
    elif row.bar.kind == OF_COPY:
        row.bar_ratio = row.bar.limit * copy_gb_per_s / row.gb_per_s
    elif row.judge_timing is not None:
        row.bar_ratio = row.timing.median / row.judge_timing.median / row.bar.limit
    else:
        row.verdict = f"{'FA3 failed' if row.rivals else 'no FA3'} here: not judged"
        return
    row.verdict = "met" if row.bar_ratio <= 1 else "MISSED"
