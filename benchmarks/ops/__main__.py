# SPDX-License-Identifier: Apache-2.0
"""The command `python -m benchmarks.ops`."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import benchmarks.ops
from benchmarks import ROOT, parser_of
from benchmarks.provenance import provenance

# run from a checkout, even if the package is not installed
sys.path.insert(0, str(ROOT / "kernels"))
# imported after the variable below is unset, because Triton's functions read it when defined
for package in ("torch", "triton"):
    if importlib.util.find_spec(package) is None:
        raise SystemExit(
            f"benchmarks.ops: {sys.executable} has no {package}. It needs a Python (3.11 or newer) "
            "with PyTorch for CUDA and Triton, and vLLM where its FlashAttention 3 is to be timed "
            "beside ours: `make bench BENCH_PYTHON=...`."
        )
os.environ.pop("TRITON_INTERPRET", None)  # never time the interpreter

import torch  # noqa: E402

from benchmarks.ops.device import gpu_facts  # noqa: E402
from benchmarks.ops.on_gpu import gpu_cases  # noqa: E402
from benchmarks.ops.timing import Entry, Row, copy_speed, run_entry, time_graphs  # noqa: E402


def run_timings(entries: Sequence[Entry], replays: int, out: Path | None) -> list[Row]:
    """Check and time all cases, and write `out` after each, so that it is always valid JSON."""
    ceiling = copy_speed(replays)
    print(f"{torch.cuda.get_device_name()}: a copy reaches {ceiling:.0f} GB/s")
    names = ("median us", "p20", "p80", "best")
    print(f"{'case':44}" + "".join(f" {name:>9}" for name in names) + f" {'GB/s':>8} {'MHz':>5}")
    head = {"provenance": provenance() | gpu_facts(), "copy_gb_per_s": ceiling}
    timer, rows = partial(time_graphs, replays=replays), list[Row]()
    for entry in entries:
        rows.append(run_entry(entry, ceiling, timer))
        print(rows[-1].line(), flush=True)
        for rival, error in rows[-1].rivals.items():
            print(f"  not {rival}: {error[:160]}", flush=True)
        if out is not None:
            found = [row.as_json() for row in rows]
            whole = {**head, "complete": len(rows) == len(entries), "rows": found}
            out.parent.mkdir(parents=True, exist_ok=True)
            out.with_suffix(".part").write_text(json.dumps(whole) + "\n")
            os.replace(out.with_suffix(".part"), out)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. The exit code is 1 if a case failed, not if a bar was missed."""
    parser = parser_of(benchmarks.ops.__doc__)
    parser.add_argument("--op", action="append", help="only this op (repeatable)")
    parser.add_argument("--quick", action="store_true", help="only the cases that have a bar")
    parser.add_argument("--replays", type=int, default=100, help="of a case, at most")
    parser.add_argument("--out", type=Path, help="JSON file, rewritten after every case")
    given = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("no CUDA device here")
    begin, out, entries = time.perf_counter(), given.out, gpu_cases()
    ops = sorted({entry.op for entry in entries})
    if given.op and not set(given.op) <= set(ops):
        parser.error(f"--op: choose from {', '.join(ops)}")
    wanted = [
        one for one in entries if one.op in (given.op or ops) and (one.bar or not given.quick)
    ]
    rows = run_timings(wanted, given.replays, out)
    verdicts = Counter(row.verdict for row in rows if row.verdict)
    bars = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()) or "none"
    failed = sum(bool(row.failed) for row in rows)
    told = f"bars: {bars}" + (f"; {failed} FAILED" if failed else "")
    print(f"{told}; {time.perf_counter() - begin:.0f} s" + (f"; written to {out}" if out else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
