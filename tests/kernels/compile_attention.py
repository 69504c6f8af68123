# SPDX-License-Identifier: Apache-2.0
"""Compile the attention, compaction and gather kernels as their launchers launch them.

`python compile_attention.py 90 [all]` prints one line of JSON per kernel built for sm_90, see
`inspect`; attention gets the tiles that it has on such a GPU. See `cross_compile` for how.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any
from unittest import mock

import torch
from cross_compile import compile_instead, read, usage
from triton.runtime import driver

from bastion_kernels import gather_rows
from bastion_kernels.accept.kv_compact import KVCaches, compact_caches
from bastion_kernels.attention import workspace as tree_attention_workspace
from bastion_kernels.attention.tree_attention import AttentionLayer, AttentionStep
from bastion_kernels.attention.workspace import TreeAttentionWorkspace

H200_PROCESSORS = 132
# bytes of shared memory that a program may have, by compute capability
SHARED_LIMIT = {
    capability: kilobytes * 1024
    for capability, kilobytes in {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}.items()
}
LAUNCH: dict[str, int] = {"dim": 0, "occupancy": 1}


def spills_in_loop(assembly: str) -> int:
    """Accesses to local memory in the loop over tiles: the smallest loop with a matrix product.

    The loop that reads tiles again, for values that are not finite, is a larger one.
    """
    lines = assembly.splitlines()
    products = [i for i, line in enumerate(lines) if re.search(r"\b(H|HG|UTCH)MMA\.", line)]
    if not products:
        return 0
    labels = {line.split(":")[0]: i for i, line in enumerate(lines) if line.startswith(".L_x_")}
    branches = ((i, re.search(r"BRA.*`\((\.L_x_\d+)\)", line)) for i, line in enumerate(lines))
    # the last way back to each label
    ends = {labels[found[1]]: i for i, found in branches if found}
    loops = [(i, end) for i, end in ends.items() if any(i < p < end for p in products)]
    start, end = min(loops, key=lambda loop: loop[1] - loop[0])
    return sum("LDL" in line or "STL" in line for line in lines[start:end])


def inspect(name: str, kernel: Any) -> dict[str, Any]:
    """What became of one launch."""
    capability, (registers, stack) = kernel.metadata.target.arch, usage(kernel)
    attention = name == "tree_attention_kernel"
    # an attention launch's head dimension, and programs on a multiprocessor that its grid counts on
    launch = LAUNCH if attention else {"dim": 0, "occupancy": 1}
    return launch | {
        "name": name,
        "threads": 32 * kernel.metadata.num_warps,
        # per thread
        "registers": registers,
        # bytes of a thread's registers that had to be put by in memory, and how many instructions
        # do so between the matrix instructions of the inner loop
        "stack": stack,
        "spills_in_loop": spills_in_loop(read(kernel, "nvdisasm", "-c")) if attention else 0,
        # bytes of a program, and how many one may have on this GPU
        "shared": kernel.metadata.shared,
        "shared_limit": SHARED_LIMIT[capability],
        # whether it has Hopper's matrix instructions
        "wgmma": "wgmma.mma_async" in kernel.asm["ptx"],
        # whether threads read for themselves what other programs may be writing
        "volatile": "ld.volatile" in kernel.asm["ptx"],
    }


def attend(
    dtype: torch.dtype, dim: int, heads: tuple[int, int], kv_dtype: torch.dtype, softcap: float,
    window: int = 0, sinks: bool = False, query_dtype: torch.dtype | None = None,
) -> None:  # fmt: skip
    """Launch tree attention once, over fused queries and a cache as vLLM lays it out."""
    rows = 65
    fused = torch.zeros(rows, heads[0] + 2 * heads[1], dim, dtype=query_dtype or dtype)
    cache = torch.zeros(4, 16, heads[1], 2 * dim, dtype=kv_dtype).transpose(1, 2)
    ints = torch.zeros(8, dtype=torch.int32)
    scales = torch.ones(1) if kv_dtype != dtype else None
    shared = SHARED_LIMIT[driver.active.get_current_target().arch]
    with mock.patch.multiple(
        tree_attention_workspace, _DEFAULT_PROGRAMS=H200_PROCESSORS, _DEFAULT_SHARED=shared
    ):
        workspace = TreeAttentionWorkspace(
            *heads, dim, dtype, 8192, 256, "cpu", window=window, max_tail=rows
        )
    LAUNCH.update(dim=dim, occupancy=workspace.tiles.occupancy)
    workspace.plan(ints[:2], ints[:1])
    step = AttentionStep(
        ints[None], ints[:2], ints[:1], ints[:1], torch.zeros(1, dtype=torch.int64),
        torch.zeros(1, rows, 3, dtype=torch.int32),
        torch.zeros(1, rows - 1, dtype=torch.int32) if window else None, {window: workspace},
    )  # fmt: skip
    layer = AttentionLayer(
        cache, dim**-0.5, softcap, window, torch.zeros(heads[0]) if sinks else None,
        torch.ones(1) if query_dtype else None, scales, scales,
    )  # fmt: skip
    layer.triton(step, fused[:, : heads[0]], torch.zeros(rows, heads[0], dim, dtype=dtype))


def move_rows() -> None:
    """Launch compaction and gathering."""
    caches = [torch.zeros(4, 16, 8, 256, dtype=torch.bfloat16).transpose(1, 2)]
    int32, int64 = torch.zeros(2, dtype=torch.int32), torch.zeros(1, 8, dtype=torch.int64)
    path = torch.zeros(1, 16, dtype=torch.int32)
    compact_caches.triton(KVCaches(caches, [0]), int64, int32, int32, path)
    odd = [torch.zeros(4, 2, 16, 5, dtype=torch.uint8)]
    compact_caches.triton(KVCaches(odd, [0]), int64, int32, int32, path)
    hidden = [torch.zeros(70, 4096, dtype=torch.bfloat16) for _ in range(5)]
    gather_rows.triton(hidden, int64[0], [h[:16].clone() for h in hidden])


if __name__ == "__main__":
    capability = int(sys.argv[1])
    compile_instead(capability, lambda *built: print(json.dumps(inspect(*built))))
    bf16, fp16, fp8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
    # the shapes that are measured against FlashAttention
    attend(bf16, 128, (32, 8), bf16, 0.0)
    if "all" in sys.argv:
        attend(bf16, 64, (14, 2), bf16, 0.0)
        attend(fp16, 80, (8, 8), fp16, 0.0)
        attend(bf16, 256, (8, 4), bf16, 50.0)
        attend(bf16, 256, (8, 4), bf16, 0.0)
        attend(bf16, 128, (40, 8), bf16, 30.0)
        # gpt-oss, Gemma-3, Gemma-2
        attend(bf16, 64, (64, 8), bf16, 0.0, window=128, sinks=True)
        attend(bf16, 128, (32, 16), bf16, 0.0, window=1024)
        attend(bf16, 256, (8, 4), bf16, 50.0, window=4096)
        # Gemma 4's global layers, on GPUs whose FlashAttention has such heads
        if capability in (90, 100):
            attend(bf16, 512, (32, 4), bf16, 0.0)
            attend(bf16, 512, (32, 4), fp8, 0.0, query_dtype=fp8)
        # Triton does not convert from this type for earlier GPUs
        if capability >= 89:
            attend(bf16, 64, (14, 2), fp8, 0.0)
            attend(bf16, 128, (32, 8), fp8, 0.0)
            attend(bf16, 256, (8, 4), fp8, 0.0)
            # as vLLM's FlashAttention backend has them
            attend(bf16, 64, (64, 8), fp8, 0.0, window=128, sinks=True, query_dtype=fp8)
            attend(bf16, 128, (32, 8), fp8, 0.0, query_dtype=fp8)
            attend(bf16, 256, (8, 4), fp8, 50.0, query_dtype=fp8)
    move_rows()
