# SPDX-License-Identifier: Apache-2.0
"""The attention, compaction and gather kernels compile for Hopper, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

HERE = Path(__file__).parent
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# of a Hopper multiprocessor: registers, bytes of shared memory, and what a program costs besides
REGISTERS, SHARED, SHARED_OF_SYSTEM = 65536, 228 * 1024, 1024


@pytest.mark.skipif(not (TOOLS / "cuobjdump").exists(), reason="this Triton has no NVIDIA back end")
@pytest.mark.parametrize("which", ["usual", pytest.param("all", marks=pytest.mark.slow)])
def test_kernels_compile_use_matrix_instructions_and_do_not_spill(which: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(HERE.parent.parent / "kernels")
    done = subprocess.run(
        [sys.executable, HERE / "compile_attention.py", which],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert {k["name"] for k in kernels} == {
        "plan_kernel",
        "tree_attention_kernel",
        "_compact_kernel",
        "_gather_kernel",
    }
    attention = [k for k in kernels if k["name"] == "tree_attention_kernel"]
    assert len(attention) == (9 if which == "all" else 1)
    for k in kernels:
        # As many programs fit a multiprocessor as the grid counts on; else some would wait for
        # others to end, and the plan's balance would be lost.
        assert k["registers"] * k["threads"] * k["occupancy"] <= REGISTERS, k
        assert (k["shared"] + SHARED_OF_SYSTEM) * k["occupancy"] <= SHARED, k
        # a few words put by once for a block of queries are no loss, in the loop they would be
        assert k["stack"] <= 96, k
        assert k["spills_in_loop"] == 0, k
    # the shapes that are measured against FlashAttention
    assert attention[0]["stack"] <= 16
    for k in attention:
        # fp32 is exact and so has none
        assert k["wgmma"] == (k["item"] == 2), k
