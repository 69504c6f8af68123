# SPDX-License-Identifier: Apache-2.0
"""The line a worker logs at start names every choice, and only those that apply."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bastion_kernels.cpu import library
from vllm_bastion.calibration.summary import EngineSummary, loaded, measured
from vllm_bastion.cpu.host import CpuHost
from vllm_bastion.host import HostChoices

ON_CPU = EngineSummary(
    drafter="DFlashDraftModel", gamma=15, candidates=16, nodes=63, budget="adaptive", lagged=False,
    costs=measured(12.34), choices=HostChoices(int8_drafter=True, own_products=True, threads=2),
)  # fmt: skip


def test_a_cpu_engine_says_all_of_it() -> None:
    assert ON_CPU.sentence() == (
        "Bastion: DFlashDraftModel with gamma 15, K 16, N 63; budget adaptive (exact); step costs "
        "measured now in 12.3 s; int8 drafter; own matrix products; 2 threads"
    )
    other = replace(ON_CPU, choices=HostChoices(own_products=False, threads=1)).sentence()
    assert other.endswith("12.3 s; vLLM matrix products; 1 thread")


def test_a_profile_without_a_date_is_no_error() -> None:
    assert loaded("") == "loaded, measured at an unknown time"


@pytest.mark.parametrize("threads", [1, 2])
def test_ops_on_one_thread_beside_more_of_pytorch_are_a_warning(
    monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    monkeypatch.setattr(library, "_load", lambda: (None, False))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    warning = CpuHost().warning()
    lines = [] if warning is None else [warning]
    assert len(lines) == threads - 1
    assert all("run on one thread" in line and "use g++" in line for line in lines)
