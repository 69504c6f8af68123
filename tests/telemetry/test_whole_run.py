# SPDX-License-Identifier: Apache-2.0
"""The line at the end of a run: sums over all steps, whether or not statistics were asked for."""

from __future__ import annotations

import pytest

from vllm_bastion.carriers import SchedulerState
from vllm_bastion.hooks import telemetry
from vllm_bastion.hooks.telemetry import log_whole_run
from vllm_bastion.telemetry.collector import Collector
from vllm_bastion.telemetry.drafter_fit import DrafterFit
from vllm_bastion.telemetry.record import StepRecord


def _collector() -> Collector:
    return Collector(DrafterFit("d", "t", None), lambda text: None)


def _tree(plain_ms: float = 40.0) -> StepRecord:
    return StepRecord("tree", "pays", 2, 18, [8, 8], [3, 2], plain_ms=plain_ms, step_ms=20.0)


def test_the_whole_run_is_counted_once() -> None:
    collector = _collector()
    for taken in (True, False, True, False):
        collector.add(_tree())
        if taken:
            assert collector.take() is not None
    whole = collector.whole()
    assert (whole.trees, whole.nodes, whole.accepted) == (8, 64, 20)
    assert whole.gain == pytest.approx(2.0)
    assert collector.whole().trees == 8
    left = collector.take()
    assert left is not None and left["trees"] == 2


def test_an_engine_core_that_ends_says_what_the_run_drafted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr(telemetry.logger, "info", said.append)
    state = SchedulerState(collector=_collector())
    assert state.collector is not None
    state.collector.add(_tree())
    for _ in range(2):
        log_whole_run(state)
    (line,) = said
    assert line.startswith("Bastion, the whole run: 8.0 nodes and 2.50 accepted tokens per tree")
    assert line.endswith("estimated gain over plain decoding 2.00x")


def test_a_run_without_a_step_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(telemetry.logger, "info", said.append)
    log_whole_run(SchedulerState())
    assert not said
