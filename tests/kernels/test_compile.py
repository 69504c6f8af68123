# SPDX-License-Identifier: Apache-2.0
"""Every kernel compiles for the GPUs it is meant for, without one, by the Triton of their users.

The scripts that compile run in a process in which Triton does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

HERE = Path(__file__).parent
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
pytestmark = pytest.mark.skipif(
    not (_TOOLS / "cuobjdump").exists(), reason="this Triton has no NVIDIA back end"
)


def printed(script: str, *arguments: str) -> list[str]:
    """The lines that a script beside this file prints."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(HERE.parent.parent / "kernels")
    done = subprocess.run(
        [sys.executable, HERE / script, *arguments], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("capability", [pytest.param("80", marks=pytest.mark.slow), "90"])
def test_kernels_compile_and_do_not_spill(capability: str) -> None:
    kernels = [line.split() for line in printed("compile_kernels.py", capability)]
    names = [name for name, *_ in kernels]
    # one variant for slots of any alignment
    assert names.count("_prompt_kernel") == names.count("_keep_kernel") == 1
    assert {*names} == {
        "_accept_kernel", "_ancestors_kernel", "_bad_words_kernel",
        "_bind_kernel", "_bits_kernel", "_commit_kernel", "_conv_kernel",
        "_context_rows_kernel", "_find_commits_kernel", "_find_kernel", "_find_states_kernel",
        "_inputs_kernel", "_insert_kernel", "_keep_kernel", "_maxima_kernel",
        "_mix_kernel", "_penalise_kernel", "_pop_kernel", "_positions_kernel",
        "_prompt_kernel", "_take_kernel", "expand_kernel", "gated_delta_commit_kernel",
        "gated_delta_tree_kernel",
    }  # fmt: skip
    # stack bytes: a call of the float64 division takes 8, what one kernel spills up to 24
    most = {"gated_delta_tree_kernel": 24}
    assert [line for line in kernels if int(line[2]) > most.get(line[0], 8)] == []
    # what a program may have on the GPUs with least
    assert [line for line in kernels if int(line[3]) > 99 * 1024] == []


# registers of a multiprocessor; bytes of shared memory that every program on it costs besides its
# own, and that a multiprocessor has besides those one program may have
REGISTERS, SHARED_OF_SYSTEM = 65536, 1024
HOPPER, BLACKWELL = 90, 100


@pytest.mark.parametrize(
    ("capability", "which"),
    [
        (HOPPER, "usual"),
        (BLACKWELL, "usual"),
        *(
            pytest.param(capability, "all", marks=pytest.mark.slow)
            for capability in (80, 86, 89, HOPPER, BLACKWELL, 120)
        ),
    ],
)
def test_kernels_compile_use_matrix_instructions_and_do_not_spill(
    capability: int, which: str
) -> None:
    lines = printed("compile_attention.py", str(capability), which)
    kernels = [json.loads(line) for line in lines]
    assert {k["name"] for k in kernels} == {
        "plan_kernel", "tree_attention_kernel", "_compact_kernel", "_gather_kernel",
    }  # fmt: skip
    attention = [k for k in kernels if k["name"] == "tree_attention_kernel"]
    shapes = 9 if capability < 89 else 15  # no fp8 before
    shapes += 2 * (capability in (HOPPER, BLACKWELL))  # heads of 512
    assert len(attention) == (shapes if which == "all" else 1)
    for k in kernels:
        assert k["shared"] <= k["shared_limit"], k
        # As many programs fit a multiprocessor as the grid counts on; else some would wait for
        # others to end, and the plan's balance would be lost. A thread gets eight registers at
        # a time.
        assert -(-k["registers"] // 8) * 8 * k["threads"] * k["occupancy"] <= REGISTERS, k
        shared = (k["shared"] + SHARED_OF_SYSTEM) * k["occupancy"]
        assert shared <= k["shared_limit"] + SHARED_OF_SYSTEM, k
        # bytes that Triton 3.7.1 spills once for a block of queries
        assert k["stack"] <= (416 if capability == BLACKWELL else 176), k
        # In the loop over tiles nothing spills, except for heads that leave too few registers: of
        # 512, of 256 on sm_80, and of 64 with fp8 on sm_120.
        crowded = k["dim"] == 512 or (capability, k["dim"]) in ((80, 256), (120, 64))
        assert k["spills_in_loop"] <= (12 if crowded else 0), k
        # Each warp could see another value, branch on it, and miss a barrier.
        assert not k["volatile"], k
    for k in attention:
        assert k["wgmma"] == (k["dim"] <= 256 and capability == HOPPER), k
    if capability == HOPPER:
        # the shapes that are measured against FlashAttention
        assert attention[0]["stack"] <= 112
