# SPDX-License-Identifier: Apache-2.0
"""Every kernel compiles for the GPUs it is meant for, without one."""

from __future__ import annotations

import pytest
from compile_scripts import needs_nvidia, printed

pytestmark = needs_nvidia


def compiled(*arguments: str) -> list[list[str]]:
    """The words of every line that `compile_kernels.py` prints."""
    return [line.split() for line in printed("compile_kernels.py", *arguments)]


@pytest.mark.parametrize("capability", [pytest.param("80", marks=pytest.mark.slow), "90"])
def test_kernels_compile_and_do_not_spill(capability: str) -> None:
    kernels = compiled(capability)
    assert {name for name, *_ in kernels} == {
        "_accept_kernel", "_advance_kernel", "_ancestors_kernel", "_bad_words_kernel",
        "_bind_kernel", "_bits_kernel", "_choose_kernel", "_commit_kernel", "_conv_kernel",
        "_context_rows_kernel", "_find_kernel", "_maxima_kernel", "_merge_kernel", "_mix_kernel",
        "_penalise_kernel", "_pop_kernel", "_positions_kernel", "_rank_kernel", "_sources_kernel",
        "_take_kernel", "expand_kernel", "extend_kernel", "gated_delta_commit_kernel",
        "gated_delta_tree_kernel",
    }  # fmt: skip
    # stack bytes: a call of the float64 division takes 8, spilled registers take more
    assert [line for line in kernels if int(line[2]) > 8] == []
    # what a program may have on the GPUs with least
    assert [line for line in kernels if int(line[3]) > 99 * 1024] == []


def test_a_batch_of_any_size_runs_the_same_code() -> None:
    variants = compiled("90", "variants")
    assert [line for line in variants if line[1] != "1"] == []
    assert {"_accept_kernel", "_ancestors_kernel", "_choose_kernel", "_take_kernel"} <= {
        name for name, _ in variants
    }
