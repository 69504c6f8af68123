# SPDX-License-Identifier: Apache-2.0
"""Two processes in a group of vLLM's measure together, and use rank 0's profile."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_bastion.calibration.agreement import from_rank_0, shared_profile
from vllm_bastion.policy.cost.devices import DeviceSpec
from vllm_bastion.policy.cost.store import (
    Profile,
    ProfileError,
    ProfileKey,
    profile_path,
    read_profile,
    write_profile,
)
from vllm_bastion.policy.cost.table import StepCostTable

KEY = ProfileKey("gpu", "t", "d", "bfloat16", "FLASH_ATTN", 1, "0.32.0")


def profile_of(ms: float) -> Profile:
    return Profile(KEY, StepCostTable.linear(ms, 0.1, max_rows=8))


def _member(rank: int, folder: Path, work: Callable[..., Any], answers: Any) -> None:
    from vllm.distributed.parallel_state import get_world_group, init_distributed_environment

    # Separate caches, as on two nodes.
    os.environ["VLLM_BASTION_CACHE"] = str(folder / f"cache{rank}")
    init_distributed_environment(2, rank, f"file://{folder / 'rendezvous'}", 0, "gloo")
    answers.put((rank, work(rank, folder, get_world_group())))


def on_two_ranks(folder: Path, work: Callable[..., Any]) -> list[Any]:
    """`work(rank, folder, group)` on ranks 0 and 1; fails if one of them hangs."""
    import vllm.distributed.parallel_state  # noqa: F401  # imported once, not by each child

    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    children = [
        context.Process(target=_member, args=(rank, folder, work, answers)) for rank in (0, 1)
    ]
    for child in children:
        child.start()
    try:
        return [answer for _, answer in sorted(answers.get(timeout=60) for _ in children)]
    finally:
        for child in children:
            child.kill()
            child.join()


def _open(rank: int, folder: Path, group: Any, setting: str = "auto") -> tuple[int, Any, str]:
    """How often this rank measured, its costs, and the error that it raised."""
    taken = []

    def measure() -> Profile:
        group.barrier()  # the dummy runs of a real measurement are collective
        taken.append(rank)
        return profile_of(5.0 * (1.01**rank))

    try:
        profile = shared_profile(setting, KEY, measure, group)
    except ProfileError as error:
        return len(taken), None, str(error)
    assert profile is not None
    return len(taken), profile.table.cost_ms(2, 100).tolist(), ""


def test_without_a_profile_all_ranks_measure_and_rank_0s_is_used(tmp_path: Path) -> None:
    first, second = on_two_ranks(tmp_path, _open)
    assert first == second == (1, profile_of(5.0).table.cost_ms(2, 100).tolist(), "")
    assert read_profile(profile_path(KEY, tmp_path / "cache0")).table.plain_ms(1, 0) == 5.1
    assert not (tmp_path / "cache1").exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_file_that_one_node_has_is_read_by_all_or_by_none(tmp_path: Path, rank: int) -> None:
    write_profile(profile_of(3.0), profile_path(KEY, tmp_path / f"cache{rank}"))
    first, second = on_two_ranks(tmp_path, _open)
    expected = profile_of(3.0 if rank == 0 else 5.0).table.cost_ms(2, 100).tolist()
    assert first == second == (rank, expected, "")


def _open_named(rank: int, folder: Path, group: Any) -> tuple[int, Any, str]:
    return _open(rank, folder, group, str(folder / "profile.json"))


def test_all_refuse_what_rank_0_cannot_read(tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text("notes")
    first, second = on_two_ranks(tmp_path, _open_named)
    assert first == second
    assert 'delete it or give "auto"' in first[2]


def _peaks(rank: int, folder: Path, group: Any) -> DeviceSpec:
    return from_rank_0(group, lambda: DeviceSpec("gpu", 1e12 * 1.01**rank, 1e9, "measured"))


def test_measured_peaks_are_rank_0s(tmp_path: Path) -> None:
    first, second = on_two_ranks(tmp_path, _peaks)
    assert first == second == DeviceSpec("gpu", 1e12, 1e9, "measured")
