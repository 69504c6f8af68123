# SPDX-License-Identifier: Apache-2.0
"""Check every op of bastion_kernels, then time it.

    python benchmarks/gpu/bench_kernels.py [--op attention] [--replays 100] [--out FILE.json]
    python benchmarks/gpu/bench_kernels.py --quick   # only cases with a bar: minutes

Prints for each case: median, 20th and 80th percentile in microseconds under CUDA-graph replay, GB/s
or TFLOP/s, the fraction of what a plain copy or matrix product reached in the same run, the clock,
FlashAttention 3's time, and the bar as measured over allowed (met if at most 1). A case whose check
fails is not timed. The JSON file is rewritten after every case, so an interrupted run is not lost.
In the file each row also has where its data was ("memory").
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# run from a checkout, even if the package is not installed
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
NEEDS = (
    "Speed is measured on a CUDA GPU, by a Python (3.11 or newer) whose PyTorch is built for CUDA "
    "and which has Triton; vLLM's FlashAttention 3, where installed, is timed beside ours. Choose "
    "the Python with `make bench BENCH_PYTHON=...`."
)

# imported after the variable below is set, because Triton's functions read it when defined
for package in ("torch", "triton"):
    if importlib.util.find_spec(package) is None:
        raise SystemExit(f"bench_kernels: {sys.executable} has no {package}. {NEEDS}")

import torch  # noqa: E402

if torch.cuda.is_available():
    os.environ.pop("TRITON_INTERPRET", None)  # never time the interpreter
else:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined

from benchmarks.gpu.cases import cases  # noqa: E402
from benchmarks.gpu.device import gpu_facts  # noqa: E402
from benchmarks.gpu.harness import (  # noqa: E402
    Row,
    measure_ceilings,
    run_entry,
)
from benchmarks.gpu.shapes import QWEN3_8B  # noqa: E402
from benchmarks.provenance import provenance  # noqa: E402

OPS = ("draft", "walk", "compact", "gather", "attention")


def line(row: Row) -> str:
    if row.timing is None:
        return f"{row.name:44} {row.failed.upper()} FAILED, not timed: {row.error}"
    t = row.timing
    text = f"{row.name:44} {t.median:9.1f} {t.p20:9.1f} {t.p80:9.1f}"
    text += f" {row.gb_per_s:8.0f}" if row.gb_per_s else " " * 9
    text += f" {row.tflop_per_s:8.1f}" if row.tflop_per_s else " " * 9
    text += f" {row.fraction:8.0%}" if row.fraction else " " * 9
    text += f" {t.sm_mhz or '?':>5}"
    if row.judge_timing is not None:
        theirs = row.judge_timing.median
        text += f"  {t.median / theirs:.2f}x {row.judge} ({theirs:.1f} us)"
    if row.bar is not None:
        measured = "" if row.bar_ratio is None else f"{row.bar_ratio:.2f} "
        text += f"  bar {row.bar.limit:g} {row.bar.kind}: {measured}{row.verdict}"
    return text


def run_timings(ops: Sequence[str], replays: int, quick: bool, out: Path) -> list[Row]:
    """Check and time all cases, and write `out` after each, so that it is always valid JSON."""
    entries = [e for e in cases(QWEN3_8B, "cuda", quick) if not ops or e.op in ops]
    ceilings = measure_ceilings(replays)
    print(f"{torch.cuda.get_device_name()}: a copy reaches {ceilings.copy:.0f} GB/s,", end=" ")
    print(f"a bf16 matrix product {ceilings.matmul:.0f} TFLOP/s")
    print(f"{'case':44} {'median us':>9} {'p20':>9} {'p80':>9}", end=" ")
    print(f"{'GB/s':>8} {'TFLOP/s':>8} {'of it':>8} {'MHz':>5}", flush=True)
    limits = {"copy_gb_per_s": ceilings.copy, "matmul_tflop_per_s": ceilings.matmul}
    head = {"provenance": provenance() | gpu_facts(), "ceilings": limits, "planned": len(entries)}
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished, rows = out.with_suffix(".part"), list[Row]()
    for entry in entries:
        torch.cuda.empty_cache()
        row = run_entry(entry, ceilings, replays)
        rows.append(row)
        found = [row.as_json() for row in rows]
        whole = {**head, "complete": len(rows) == len(entries), "rows": found}
        unfinished.write_text(json.dumps(whole) + "\n")
        os.replace(unfinished, out)
        print(line(row), flush=True)
        for rival in row.rivals:
            if "error" in rival:
                print(f"  not {rival['name']}: {rival['error'][:160]}", flush=True)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. The exit code is 1 if a case failed, not if a bar was missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--op", action="append", choices=OPS, help="only this op (repeatable)")
    parser.add_argument("--quick", action="store_true", help="only the cases that have a bar")
    parser.add_argument("--replays", type=int, default=100, help="graph replays per case, at most")
    parser.add_argument("--out", type=Path, help="JSON file, by default under benchmarks/results")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise SystemExit(f"bench_kernels: no CUDA device, so there is no speed to measure. {NEEDS}")
    begin = time.perf_counter()
    gpu = torch.cuda.get_device_name().replace(" ", "-").lower()
    out = args.out or ROOT / "benchmarks" / "results" / f"kernels-{gpu}.json"
    rows = run_timings(args.op or (), args.replays, args.quick, out)
    verdicts = Counter(row.verdict for row in rows if row.verdict)
    bars = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()) or "none"
    failed = sum(bool(row.failed) for row in rows)
    told = f"bars: {bars}" + (f"; {failed} FAILED" if failed else "")
    print(f"{told}; {time.perf_counter() - begin:.0f} s; written to {out}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
