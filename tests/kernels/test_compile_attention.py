# SPDX-License-Identifier: Apache-2.0
"""The attention, compaction and gather kernels compile for Hopper, without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

HERE = Path(__file__).parent
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


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
    kernels = [text.split() for text in done.stdout.splitlines()]
    names = [name for _, name, *_ in kernels]
    assert set(names) == {
        "plan_kernel",
        "tree_attention_kernel",
        "_compact_kernel",
        "_gather_kernel",
    }
    # the two fp32 launches, last, are exact and so have none
    attention = [matrix for matrix, name, *_ in kernels if name == "tree_attention_kernel"]
    assert attention == (["wgmma"] * 5 + ["-"] * 2 if which == "all" else ["wgmma"])
    # a few words put by once outside the loop are no loss; a spilled tile is hundreds of bytes
    assert [k for k in kernels if int(k[3]) > 32] == []
