# SPDX-License-Identifier: Apache-2.0
"""Carries what steps recorded from the engine core to every front end.

Between the two processes, msgpack keeps the fields that `SchedulerStats` declares and drops all
others, those of subclasses included. One of them is a dictionary of anything:
`kv_connector_stats`. Our entry is stored there next to a KV connector's; the front end takes it out
before another logger sees it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from vllm.v1.metrics.loggers import AggregateStatLoggerBase, PrometheusStatLogger
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

from vllm_bastion import envs
from vllm_bastion.attached import StepPlan, StepReport
from vllm_bastion.config import bastion_config, chain_view_of
from vllm_bastion.logger import init_logger
from vllm_bastion.scheduler.gate import Arm
from vllm_bastion.telemetry.collector import GAIN, KEY
from vllm_bastion.telemetry.counts import Counts, StepRecord, from_plain
from vllm_bastion.telemetry.prometheus import TreeMetrics
from vllm_bastion.telemetry.text import interval_line

logger = init_logger(__name__)

_NAME = attrgetter("request_id")


class TreeRequestMetrics(RequestSpecDecodeMetrics):
    """vLLM's metrics of one request: drafted tokens are nodes, and the histogram is over depths."""

    def observe(self, num_draft_tokens: int, num_accepted: int, detailed: bool = False) -> None:
        """Count a step of the request, unless it verified none of its nodes."""
        if num_draft_tokens > 0:
            super().observe(num_draft_tokens, num_accepted, detailed)


def send(scheduler: Any, outputs: dict[int, Any]) -> None:
    """In the engine core: attach a due sum to the statistics of a step's outputs.

    vLLM runs one more step without a token after the last request was aborted: its sum is due, too.
    """
    state = scheduler.state
    if not state.collector.due(idle=not scheduler.running):
        return
    # Without statistics the sums wait for the next ones; they do not grow.
    stats = next((o.scheduler_stats for o in outputs.values() if o.scheduler_stats), None)
    if stats is None:
        return
    gain = state.gate.gain(max(len(scheduler.running), 1))
    if (sums := state.collector.take(gain)) is not None:
        stats.kv_connector_stats = {**(stats.kv_connector_stats or {}), KEY: sums}


def record_of(
    scheduler: Any, plan: StepPlan, report: StepReport, outputs: list[Any], tokens: int
) -> StepRecord:
    """The record of a step, in the engine core.

    Args:
        scheduler: ours.
        report: the worker's.
        outputs: those of `update_from_output` that have tokens, none of them after a stop.
        tokens: how many they have.
    """
    requests, trees, nodes, kind = len(outputs), 0, 0, "prompt"
    if report.num_verified:
        verified = [*filter(None, map(report.num_verified.get, map(_NAME, outputs)))]
        trees, nodes = len(verified), sum(verified)
    if trees:
        chains = scheduler.settings.bastion_top_k == 1
        kind = "n-gram" if report.verified == Arm.NGRAM else "chain" if chains else "tree"
    elif requests:
        kind = "plain"
    return StepRecord(
        kind,
        plan.reason if requests else "",
        requests,
        trees,
        nodes,
        # The last token of a request is the target's own.
        tokens - requests,
        report.expected,
        scheduler.state.last.ms,
        report.sources,
    )


class BastionStatLogger(AggregateStatLoggerBase):
    """In a front end: writes the sums of its engines to Prometheus and to the log.

    Args:
        prometheus: vLLM's own Prometheus logger, whose labels and classes of metrics it shares.
        writes_lines: whether vLLM logs its periodic line in this process.
    """

    def __init__(self, prometheus: PrometheusStatLogger, *, writes_lines: bool) -> None:
        self._metrics = TreeMetrics(
            ["model_name", "engine"],
            prometheus.per_engine_labelvalues,
            prometheus._counter_cls,
            prometheus._gauge_cls,
        )
        self._writes_lines = writes_lines
        # Sums since the last line, by engine, and the last gain.
        self._interval: dict[int, tuple[Counts, float | None]] = {}

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Take our sum out of vLLM's statistics. Must run before the other loggers do."""
        sums = getattr(scheduler_stats, "kv_connector_stats", None)
        if not sums or KEY not in sums:
            return
        own = sums.pop(KEY)
        # Without a connector vLLM expects None.
        scheduler_stats.kv_connector_stats = sums or None
        gain, counts = own.pop(GAIN, None), from_plain(own)
        self._metrics.observe(counts, gain, engine_idx)
        before, _ = self._interval.get(engine_idx, (Counter(), None))
        self._interval[engine_idx] = before + counts, gain

    def log(self) -> None:
        """A line for each engine that has decoded since the last call."""
        intervals, self._interval = self._interval, {}
        for engine, (counts, gain) in sorted(intervals.items()):
            if self._writes_lines and (line := interval_line(counts, gain)) is not None:
                logger.info("Engine %03d: %s", engine, line)

    def log_engine_initialized(self) -> None:
        """Nothing: the worker has logged its settings."""


def stat_logger_manager_init(
    original: Callable[..., Any], self: Any, vllm_config: Any, *args: Any, **kwargs: Any
) -> None:
    """Add our logger to those of a front end, as the first one.

    vLLM makes one counter per speculative token, but a tree's statistics have one entry per depth.
    """
    config = bastion_config(vllm_config)
    depth = None if config is None else config.tree_depth
    original(self, chain_view_of(vllm_config, depth), *args, **kwargs)
    if config is None or not envs.telemetry():
        return
    found = [own for own in self.stat_loggers if isinstance(own, PrometheusStatLogger)]
    # With several API servers vLLM logs no line: each of them sees a part of the statistics.
    writes_lines = kwargs.get("enable_default_loggers", True) and kwargs.get("client_count", 1) == 1
    self.stat_loggers.insert(0, BastionStatLogger(found[0], writes_lines=writes_lines))
