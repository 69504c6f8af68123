# SPDX-License-Identifier: Apache-2.0
"""Compile every kernel to a cubin, on any machine: launch each op, but build instead of run.

The interpreter accepts code that Triton's compiler refuses (a variable whose type changes in a
loop, a missing conversion), so the interpreted tests alone would not show that a GPU can run the
kernels. `python compile_kernels.py 90` prints one line per kernel: name, registers, stack bytes
(spills). Needs Triton's NVIDIA back end (part of its wheel), no GPU. A script of its own, because
TRITON_INTERPRET must not be set.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from bastion_kernels.budget import choose_budget_triton
from bastion_kernels.topk_logprobs import topk_logprobs_triton, topk_partial_triton
from bastion_kernels.tree_build import expand_best_first_triton
from bastion_kernels.tree_mask import ancestor_bits_triton, tree_positions_triton
from bastion_kernels.tree_verify import accept_path_triton

_TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def compile_instead(capability: int) -> None:
    """Make every kernel launch compile for sm_`capability` and print what came out."""

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        values = dict(zip(self.arg_names, args, strict=False))
        values |= {name: options.pop(name) for name in list(options) if name in self.arg_names}
        signature, constants, attributes = {}, {}, {}
        for place, parameter in enumerate(self.params):
            value = values[parameter.name]
            whole = isinstance(value, int) and not parameter.do_not_specialize
            if parameter.is_constexpr or (whole and value == 1):
                signature[parameter.name] = "constexpr"
                constants[(place,)] = value
                continue
            if isinstance(value, Tensor):
                signature[parameter.name] = _TYPES[value.dtype]
            else:
                signature[parameter.name] = "i32" if isinstance(value, int) else "fp32"
            if isinstance(value, Tensor) or (whole and value % 16 == 0):
                attributes[(place,)] = [["tt.divisibility", 16]]
        source = ASTSource(fn=self, signature=signature, constexprs=constants, attrs=attributes)
        kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        report(self.__name__, kernel.asm["cubin"])

    JITFunction.run = run  # type: ignore[method-assign]


def report(name: str, cubin: bytes) -> None:
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [_TOOLS / "cuobjdump", "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage.stdout)
    assert found, usage.stdout + usage.stderr
    print(name, *found.groups())


def launch_all(reqs: int, limit: int, width: int, dtype: torch.dtype) -> None:
    """One launch of every kernel of the tree ops, for real sizes."""
    slots_total, depth = reqs + 1, 15
    slots = torch.zeros(reqs, dtype=torch.int64)
    ends = torch.zeros(reqs + 1, dtype=torch.int32)
    tokens = torch.zeros(reqs * depth, width, dtype=torch.int32)
    logprobs = torch.zeros(reqs * depth, width)
    logits = torch.zeros(reqs * depth, 151_936, dtype=dtype)
    topk_logprobs_triton(logits, width, tokens, logprobs)
    keys = torch.zeros(reqs * depth, width, dtype=torch.int64)
    topk_partial_triton(logits, width, 0, keys, logprobs[:, 0].contiguous())

    out_tokens = torch.zeros(reqs, limit, dtype=torch.int64)
    parents, depths = (torch.zeros(slots_total, limit, dtype=torch.int32) for _ in range(2))
    log_rho, counts = torch.zeros(slots_total, limit), torch.zeros(slots_total, dtype=torch.int32)
    shape = (reqs, depth, width)
    spine = torch.zeros(slots_total, dtype=torch.bool)
    trees = (out_tokens, parents, depths, log_rho, counts)
    expand_best_first_triton(tokens.view(shape), logprobs.view(shape), spine, slots, *trees)
    cost, base = torch.ones(600), torch.zeros((), dtype=torch.int32)
    choose_budget_triton(log_rho, slots, counts, cost, base, counts)
    choose_budget_triton(log_rho, slots, counts, cost, 1, counts, "first_decrease")
    bits = torch.zeros(slots_total, limit + 1, limit // 32 + 1, dtype=torch.int32)
    ancestor_bits_triton(parents, slots, bits)
    rows = torch.zeros(reqs * (limit + 1), dtype=torch.int64)
    tree_positions_triton(rows, depths, slots, ends, ends, rows)
    path = torch.zeros(reqs, depth + 1, dtype=torch.int32)
    accept_path_triton(rows, rows, parents, slots, ends, path, path.long(), counts)


if __name__ == "__main__":
    compile_instead(int(sys.argv[1]))
    launch_all(reqs=1, limit=64, width=8, dtype=torch.bfloat16)
    launch_all(reqs=3, limit=512, width=32, dtype=torch.float32)
