# SPDX-License-Identifier: Apache-2.0
"""The attention, compaction and gather kernels compile for every kind of GPU, without one."""

from __future__ import annotations

import json

import pytest
from compile_scripts import needs_nvidia, printed

# registers of a multiprocessor; bytes of shared memory that every program on it costs besides its
# own, and that a multiprocessor has besides those one program may have
REGISTERS, SHARED_OF_SYSTEM = 65536, 1024
HOPPER = 90


@needs_nvidia
@pytest.mark.parametrize(
    ("capability", "which"),
    [
        (HOPPER, "usual"),
        *(
            pytest.param(capability, "all", marks=pytest.mark.slow)
            for capability in (80, 86, 89, HOPPER, 100, 120)
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
    shapes = 12 if capability < 89 else 18  # no fp8 before
    shapes += 2 * (capability in (90, 100))  # heads of 512
    assert len(attention) == (shapes if which == "all" else 1)
    for k in kernels:
        assert k["shared"] <= k["shared_limit"], k
        # As many programs fit a multiprocessor as the grid counts on; else some would wait for
        # others to end, and the plan's balance would be lost. A thread gets eight registers at
        # a time.
        assert -(-k["registers"] // 8) * 8 * k["threads"] * k["occupancy"] <= REGISTERS, k
        shared = (k["shared"] + SHARED_OF_SYSTEM) * k["occupancy"]
        assert shared <= k["shared_limit"] + SHARED_OF_SYSTEM, k
        # A few words put by once for a block of queries are no loss, in the loop they would be.
        # sm_100 puts by more, all of it outside of the loop.
        assert k["stack"] <= (256 if capability == 100 else 96), k
        # float8 queries of heads of 512 leave no register to spare
        assert k["spills_in_loop"] <= (3 if k["dim"] == 512 else 0), k
        # Each warp could see another value, branch on it, and miss a barrier.
        assert not k["volatile"], k
    for k in attention:
        # fp32 is exact and so has none
        assert k["wgmma"] == (k["item"] == 2 and k["dim"] <= 256 and capability == HOPPER), k
    if capability == HOPPER:
        # the shapes that are measured against FlashAttention
        assert attention[0]["stack"] <= 16
