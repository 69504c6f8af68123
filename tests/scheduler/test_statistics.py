# SPDX-License-Identifier: Apache-2.0
"""vLLM's statistics of speculative decoding for trees: draft tokens are nodes, positions depths."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
from vllm.v1.spec_decode.metrics import SpecDecodingLogging, SpecDecodingProm

from tests.scheduler_core import GAMMA, NODES, engine_of, new_core, settings
from vllm_bastion.hooks.scheduler import TreeSpecDecodingStats
from vllm_bastion.hooks.telemetry import stat_logger_manager_init


def test_statistics_of_a_tree_count_nodes_and_depths() -> None:
    core, stats, depth = new_core(), None, settings().tree_depth
    # (verified, accepted): more nodes than depths, fewer, and none, which is no draft
    for verified, accepted in ((60, 5), (3, 1), (0, 0)):
        stats = core.make_spec_decoding_stats(
            stats, num_draft_tokens=NODES, num_accepted_tokens=accepted,
            num_invalid_spec_tokens={"r": NODES - verified}, request_id="r",
        )  # fmt: skip
    assert (stats.num_spec_tokens, stats.num_drafts) == (depth, 2)
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (63, 6)
    assert stats.num_accepted_tokens_per_pos == [2, 1, 1, 1, 1, *[0] * (depth - 5)]
    assert len(stats.num_draft_tokens_per_pos) == depth
    line: list[str] = []
    log = SpecDecodingLogging()
    log.observe(stats)
    log.log(log_fn=lambda text, *values: line.append(text % values))
    assert "Mean acceptance length: 4.00" in line[0] and "Drafted: 63 tokens" in line[0]


def test_a_step_that_drafts_nothing_has_no_statistics() -> None:
    """vLLM's log divides by the drafts of the steps that have statistics."""
    core = new_core()
    assert core.make_spec_decoding_stats(None, NODES, 0, {"r": NODES}, "r") is None


def test_statistics_travel_to_the_front_end() -> None:
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    stats = TreeSpecDecodingStats.new(GAMMA)
    stats.observe_draft(60, 5)
    sent = MsgpackEncoder().encode(SchedulerStats(spec_decoding_stats=stats))
    got = MsgpackDecoder(SchedulerStats).decode(sent).spec_decoding_stats
    assert (got.num_draft_tokens, got.num_accepted_tokens) == (60, 5)


def test_prometheus_has_one_counter_per_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = prometheus_client.CollectorRegistry()

    def counter(**kwargs: Any) -> prometheus_client.Counter:
        return prometheus_client.Counter(registry=registry, **kwargs)

    monkeypatch.setattr(SpecDecodingProm, "_counter_cls", staticmethod(counter))
    depth, made = settings().tree_depth, []

    def original(manager: Any, vllm_config: Any) -> None:
        labels = ["model_name", "engine"]
        made.append(SpecDecodingProm(vllm_config.speculative_config, labels, {0: ["tiny", "0"]}))

    monkeypatch.setenv("VLLM_BASTION_TELEMETRY", "0")
    stat_logger_manager_init(original, SimpleNamespace(), engine_of(settings()))
    (metrics,) = made
    stats = TreeSpecDecodingStats.new(depth)
    stats.observe_draft(60, 5)
    metrics.observe(stats)
    samples = {
        (sample.name, sample.labels.get("position")): sample.value
        for family in registry.collect()
        for sample in family.samples
    }
    assert samples["vllm:spec_decode_num_draft_tokens_total", None] == 60
    per_position = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    got = [samples[per_position, str(position)] for position in range(depth)]
    assert got == [1, 1, 1, 1, 1, *[0] * (depth - 5)]
    assert (per_position, str(depth)) not in samples
