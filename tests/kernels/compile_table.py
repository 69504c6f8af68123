# SPDX-License-Identifier: Apache-2.0
"""A table of what every kernel needs on every kind of GPU, by every Triton that is given.

    python tests/kernels/compile_table.py PYTHON ... > benchmarks/results/gpu/compiled.md

Each PYTHON is an interpreter with a Triton, PyTorch and NumPy. Needs no GPU, see `cross_compile`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).parent
CAPABILITIES = (80, 86, 89, 90, 100, 120)
SLOTS = (16, 256, 1024)
INTRODUCTION = """# What the kernels need, compiled without a GPU

`python tests/kernels/compile_table.py PYTHON ...` makes this page, one PYTHON for each Triton.
A cell has a thread's registers, its bytes of stack, and a program's KiB of shared memory, each the
largest of all variants that the row stands for. Stack holds spilled registers; 8 bytes are a call
of a float64 function. Trees have 255 nodes, depth 15 and 16 candidates; models have the sizes of
Qwen3-8B and Qwen3.5 unless the row says otherwise. Some kernels depend on the request slots S;
`plan_kernel` is the variant for steps of S requests and 8,192 rows (S = 1024: sm_90 only). The slow
tests compile more shapes of attention (`test_compile_attention.py`).
"""


def compile_all(capability: int) -> None:
    """Print a line of JSON for every kernel: row of the table, registers, stack, shared bytes."""
    import compile_kernels
    import torch
    from compile_attention import attend, move_rows
    from cross_compile import compile_instead, usage

    from bastion_kernels import choose_budget, take_best
    from bastion_kernels.attention.workspace import TreeAttentionWorkspace

    label = ""

    def built(name: str, kernel: Any) -> None:
        print(json.dumps([f"`{name}`{label}", *usage(kernel), kernel.metadata.shared]))

    compile_instead(capability, built)
    bf16 = torch.bfloat16
    compile_kernels.launch_all(reqs=1, limit=255, width=16, dtype=bf16)
    compile_kernels.launch_recurrent(bf16)
    for slots in SLOTS:
        label = f" S = {slots}"
        log_rho, ends = torch.zeros(slots, 255), torch.zeros(slots + 1, dtype=torch.int32)
        rows, counts = torch.zeros(slots, dtype=torch.int64), ends[:slots]
        cost, base = torch.ones(8192), torch.zeros((), dtype=torch.int32)
        choose_budget.triton(log_rho, rows, counts, cost, base, counts, promised=cost)
        take_best.triton(log_rho, rows, counts, counts, 100, ends, ends, ends)
        workspace = TreeAttentionWorkspace(32, 8, 128, bf16, 8192, slots, "cpu", processors=132)
        # its largest variant takes half a minute to compile
        if slots < 1024 or capability == 90:
            workspace._plan(ends, ends[:1], workspace.capacity)
    fp8 = torch.float8_e4m3fn
    with mock.patch.object(TreeAttentionWorkspace, "plan"):
        label = " Qwen3-8B"
        attend(bf16, 128, (32, 8), bf16, 0.0)
        label = " gpt-oss, layers with a window"
        attend(bf16, 64, (64, 8), bf16, 0.0, window=128, sinks=True)
        if capability >= 89:
            label = " Qwen3-8B, float8 cache and queries"
            attend(bf16, 128, (32, 8), fp8, 0.0, query_dtype=fp8)
    label = ""
    move_rows()


def ask(python: str, *arguments: str) -> list[Any]:
    """The lines of JSON that this script prints under another interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(HERE.parent.parent / "kernels")
    done = subprocess.run(
        [python, __file__, *arguments], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return [json.loads(line) for line in done.stdout.splitlines()]


def table(triton: str, columns: Iterable[list[Any]]) -> str:
    """Rows in the order of the first GPU that has them; of variants the largest numbers."""
    cells: dict[str, dict[int, list[int]]] = {}
    for capability, kernels in zip(CAPABILITIES, columns, strict=True):
        for row, *numbers in kernels:
            known = cells.setdefault(row, {}).setdefault(capability, numbers)
            known[:] = map(max, known, numbers)
    lines = [f"## Triton {triton}", "", "| kernel |" + "".join(f" sm_{c} |" for c in CAPABILITIES)]
    lines.append("|---|" + "---|" * len(CAPABILITIES))
    for row, found in cells.items():
        line = f"| {row} |"
        for capability in CAPABILITIES:
            registers, stack, shared = found.get(capability, (0, 0, 0))
            line += f" {registers}, {stack}, {-(-shared // 1024)} |" if registers else " |"
        lines.append(line)
    return "\n".join(lines) + "\n"


def main(pythons: list[str]) -> None:
    print(INTRODUCTION)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        asked = [
            (ask(python, "version")[0], [pool.submit(ask, python, str(c)) for c in CAPABILITIES])
            for python in pythons
        ]
        print("\n".join(table(version, [job.result() for job in jobs]) for version, jobs in asked))


if __name__ == "__main__":
    if sys.argv[1] == "version":
        import triton

        print(json.dumps(triton.__version__))
    elif sys.argv[1].isdigit():
        compile_all(int(sys.argv[1]))
    else:
        main(sys.argv[1:])
