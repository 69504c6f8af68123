# SPDX-License-Identifier: Apache-2.0
"""The command `python -m benchmarks.ops`."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial

import benchmarks.ops
from benchmarks import ROOT, parser_of

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
from benchmarks.ops.sizes import QWEN3_8B, SMALL  # noqa: E402
from benchmarks.ops.timing import copy_speed, run_entry, time_graphs  # noqa: E402


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. The exit code is 1 if a case failed, not if a bar was missed."""
    parser = parser_of(benchmarks.ops.__doc__)
    parser.add_argument("--op", action="append", help="only this op (repeatable)")
    parser.add_argument("--quick", action="store_true", help="only the cases that have a bar")
    parser.add_argument("--small", action="store_true", help="sizes for the simulated GPU")
    parser.add_argument("--replays", type=int, default=100, help="of a case, at most")
    given = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("no CUDA device here")
    entries = gpu_cases(SMALL if given.small else QWEN3_8B)
    ops = sorted({entry.op for entry in entries})
    if given.op and not set(given.op) <= set(ops):
        parser.error(f"--op: choose from {', '.join(ops)}")
    ceiling = copy_speed(given.replays, 2**12 if given.small else 2**30)
    print(", ".join(f"{name} {found}" for name, found in gpu_facts().items()))
    print(f"a copy reaches {ceiling:.0f} GB/s")
    names = ("median us", "p20", "p80", "best")
    print(f"{'case':44}" + "".join(f" {name:>9}" for name in names) + f" {'GB/s':>8} {'MHz':>5}")
    verdicts = Counter[str]()
    for entry in entries:
        if entry.op in (given.op or ops) and (entry.bar or not given.quick):
            row = run_entry(entry, ceiling, partial(time_graphs, replays=given.replays))
            print(row.line(), flush=True)
            for rival, error in row.rivals.items():
                print(f"  not {rival}: {error[:160]}", flush=True)
            verdicts["FAILED" if row.failed else row.verdict] += 1
    print(
        "bars: " + ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items() if verdict)
    )
    return int(verdicts["FAILED"] > 0)


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main())
