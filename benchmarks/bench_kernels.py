# SPDX-License-Identifier: Apache-2.0
"""Check every op of bastion_kernels, then time it.

    python benchmarks/bench_kernels.py [--op attention] [--replays 100] [--out FILE.json]
    python benchmarks/bench_kernels.py --check        # only the checks; small shapes without a GPU

Prints per case: median, 20th and 80th percentile in microseconds under CUDA-graph replay, GB/s or
TFLOP/s, the fraction of what a plain copy or matrix product reached in the same run, and the case's
bar as measured over allowed (met when at most 1). No speed is printed where the check fails.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]  # from a checkout, installed or not
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined

from benchmarks._harness import Row, measure_ceilings, provenance, run_case  # noqa: E402
from benchmarks.cases import QWEN3_8B, TINY, cases  # noqa: E402

OPS = ("draft", "walk", "compact", "gather", "attention")


def line(row: Row) -> str:
    """One line of the table."""
    if row.timing is None:
        return f"{row.name:44} CHECK FAILED, not timed: {row.error}"
    t = row.timing
    text = f"{row.name:44} {t.median:9.1f} {t.p20:9.1f} {t.p80:9.1f}"
    text += f" {row.gb_per_s:8.0f}" if row.gb_per_s else " " * 9
    text += f" {row.tflop_per_s:8.1f}" if row.tflop_per_s else " " * 9
    text += f" {row.fraction:8.0%}" if row.fraction else " " * 9
    if row.baseline_timing is not None:
        text += f"  {t.median / row.baseline_timing.median:.2f}x {row.baseline}"
        text += f" ({row.baseline_timing.median:.1f} us)"
    if row.bar is not None and row.bar_ratio is not None:
        verdict = "met" if row.bar_ratio <= 1 else "MISSED"
        text += f"  bar {row.bar.limit:g} {row.bar.kind}: {row.bar_ratio:.2f} {verdict}"
    return text


def run_checks(ops: Sequence[str]) -> int:
    """Run the checks alone; on a CPU the Triton code is interpreted, at small shapes."""
    on_gpu = torch.cuda.is_available()
    failed = 0
    for op, make in cases(QWEN3_8B if on_gpu else TINY, "cuda" if on_gpu else "cpu"):
        if ops and op not in ops:
            continue
        case = make()
        try:
            case.check()
        except Exception as error:
            failed += 1
            print(f"{case.name:44} FAILED: {error}")
        else:
            print(f"{case.name:44} ok")
    return failed


def run_timings(ops: Sequence[str], replays: int) -> dict[str, Any]:
    """Check and time; returns what goes into the JSON file."""
    gpu = torch.cuda.get_device_name()
    ceilings = measure_ceilings(replays)
    print(f"{gpu}: a copy reaches {ceilings.copy:.0f} GB/s,", end=" ")
    print(f"a bf16 matrix product {ceilings.matmul:.0f} TFLOP/s")
    print(f"{'case':44} {'median us':>9} {'p20':>9} {'p80':>9}", end=" ")
    print(f"{'GB/s':>8} {'TFLOP/s':>8} {'of it':>8}")
    rows = []
    for op, make in cases(QWEN3_8B, "cuda"):
        if ops and op not in ops:
            continue
        case = make()
        rows.append(run_case(case, ceilings, replays))
        print(line(rows[-1]), flush=True)
        del case
        torch.cuda.empty_cache()
    return {
        "provenance": provenance(),
        "ceilings": {"copy_gb_per_s": ceilings.copy, "matmul_tflop_per_s": ceilings.matmul},
        "rows": [row.as_json() for row in rows],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; the exit code is 1 where a check failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--op", action="append", choices=OPS, help="only this op (repeatable)")
    parser.add_argument("--replays", type=int, default=100, help="graph replays per case")
    parser.add_argument("--out", type=Path, help="JSON file, by default under benchmarks/results")
    parser.add_argument("--check", action="store_true", help="only check, do not time")
    args = parser.parse_args(argv)
    if args.check:
        return 1 if run_checks(args.op or ()) else 0
    if not torch.cuda.is_available():
        raise SystemExit(
            "bench_kernels: no CUDA device, so there is no speed to measure; "
            "--check runs the correctness checks on this machine."
        )
    result = run_timings(args.op or (), args.replays)
    gpu = torch.cuda.get_device_name().replace(" ", "-").lower()
    out = args.out or ROOT / "benchmarks" / "results" / f"kernels-{gpu}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {out}")
    return 1 if any("error" in row for row in result["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
