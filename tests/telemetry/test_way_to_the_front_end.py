# SPDX-License-Identifier: Apache-2.0
"""A thousand steps from a worker's recorder through the engine core to a front end's metrics."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from registries import registered
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm_bastion.telemetry.recorder import Recorder

from vllm_bastion.carriers import SchedulerState
from vllm_bastion.hooks import telemetry
from vllm_bastion.telemetry.record import Totals


@pytest.mark.parametrize("requests", [1, 12])
def test_nothing_is_lost_on_the_way(monkeypatch: pytest.MonkeyPatch, requests: int) -> None:
    model = SimpleNamespace(model="m")
    config = SimpleNamespace(
        draft_model_config=model, target_model_config=model, drafter_positions=100
    )
    monkeypatch.setattr(telemetry, "settings_of", lambda vllm_config: config)
    warnings: list[str] = []
    monkeypatch.setattr(telemetry.logger, "warning", warnings.append)
    registry, metrics = registered({0: ["m", "0"]})
    # Half a millisecond a step: sums are sent now and then, and once more at the end.
    now = 0.0
    recorder = Recorder("tree", "no gate", lambda: {"tree": 1.5}, lambda: now)
    scheduler, state, draw = SimpleNamespace(vllm_config=None), SchedulerState(), random.Random(0)
    told = {"nodes": 0, "trees": 0, "accepted": 0, "measured": 0.0, "yielded": 0, "plain": 0}
    records, sent = [], 0
    for step in range(1000):
        now += 0.0005
        nodes = [draw.choice((1, 7, 63)) for _ in range(requests)] if draw.random() < 0.8 else []
        accepted = [draw.randint(0, 5) for _ in nodes]
        recorder.decided(bool(nodes), "pays" if nodes else "does not pay", requests, 3.0)
        recorder.timed(bool(nodes), sum(nodes) + requests, 4.0, 5.0)
        recorder.yielded(2.5, sum(accepted))
        recorder.ended(requests, sum(nodes), sum(nodes) + requests, 4.0)
        record = recorder.take()
        recorder.finish(record, nodes, accepted)
        records.append(record)
        told["nodes"] += sum(nodes)
        told["trees"] += len(nodes)
        told["accepted"] += sum(accepted)
        told["yielded"] += sum(accepted)
        told["measured"] += 5.0
        told["plain"] += not nodes
        scheduler.running = [] if step == 999 else ["r"]
        outputs: dict[int, Any] = {0: SimpleNamespace(scheduler_stats=SchedulerStats())}
        telemetry.collect(scheduler, state, record, 101 if step == 500 else 99, outputs)
        stats = outputs[0].scheduler_stats
        if stats.kv_connector_stats:
            stats = MsgpackDecoder(SchedulerStats).decode(MsgpackEncoder().encode(stats))
            metrics.observe(Totals.from_plain(stats.kv_connector_stats["bastion"]), 0)
            sent += 1
    found: dict[str, float] = {}
    for family in registry.collect():
        for sample in family.samples:
            name = sample.name.removeprefix("vllm:bastion_")
            if not name.endswith(("_bucket", "_created")):
                found[name] = found.get(name, 0.0) + sample.value
            if sample.labels.get("kind") == "plain" and name == "steps_total":
                found["plain"] = found.get("plain", 0.0) + sample.value
    assert 1 < sent < 1000
    assert found["steps_total"] == 1000 and found["plain"] == told["plain"]
    assert found["nodes_verified_sum"] == told["nodes"]
    assert found["nodes_verified_count"] == told["trees"]
    assert found["accepted_by_depth_total"] == told["accepted"]
    assert found["yielded_tokens_total"] == told["yielded"]
    assert found["promised_tokens_total"] == 2500.0
    assert found["timed_steps_total"] == 1000 and found["measured_step_ms_total"] == 5000.0
    assert found["correction_factor"] == 1.5
    own = Totals()
    own.add(records)
    assert own.plain_ms == pytest.approx(found["plain_equivalent_ms_total"])
    assert own.step_ms == pytest.approx(found["decode_ms_total"])
    assert len(warnings) == 1 and "101 tokens" in warnings[0]
