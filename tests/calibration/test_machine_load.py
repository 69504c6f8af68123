# SPDX-License-Identifier: Apache-2.0
"""The share of the CPUs that others used, from the kernel's counts."""

from __future__ import annotations

import multiprocessing
import time

import pytest

from vllm_bastion.calibration.load import CpuTimes

START = CpuTimes(busy=100.0, idle=50.0, own=10.0)


def test_others_are_what_this_process_did_not_use() -> None:
    assert START.others_until(CpuTimes(120.0, 50.0, 20.0)) == pytest.approx(0.5)
    assert START.others_until(CpuTimes(120.0, 50.0, 20.0), processes=2) == 0.0
    assert START.others_until(CpuTimes(120.0, 50.0, 31.0)) == 0.0


def test_others_do_not_matter_while_cpus_are_idle() -> None:
    assert START.others_until(CpuTimes(120.0, 60.0, 20.0)) == 0.0
    assert START.others_until(START) == 0.0


def _spin(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def test_another_process_is_seen_and_this_one_is_not() -> None:
    """On this machine, whatever else runs on it."""
    begin = CpuTimes.now()
    if begin is None:
        pytest.skip("the system does not tell")
    other = multiprocessing.get_context("fork").Process(target=_spin, args=(1.0,))
    other.start()
    time.sleep(1.2)
    end = CpuTimes.now()
    other.join()
    assert end is not None and end.own - begin.own < 0.5
    assert end.busy - begin.busy >= 0.5 - 0.1
