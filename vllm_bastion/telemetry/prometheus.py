# SPDX-License-Identifier: Apache-2.0
"""The metrics `vllm:bastion_*`. `docs/metrics.md` says what each is good for.

Sums are in milliseconds, not in seconds: `llm.get_metrics()` truncates counters to integers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import prometheus_client

from vllm_bastion.telemetry.record import NODE_BUCKETS, SOURCES, Totals


class TreeMetrics:
    """Prometheus metrics of the engines that a front end talks to.

    With several front end processes each has these metrics, and Prometheus' multiprocess mode adds
    the counters up.

    Args:
        labelnames: labels of vLLM's own metrics.
        labelvalues: engine index -> their values.
        counter, gauge, histogram: classes of metrics; vLLM has others for Ray.
    """

    def __init__(
        self,
        labelnames: Sequence[str],
        labelvalues: Mapping[int, Sequence[object]],
        counter: Any = prometheus_client.Counter,
        gauge: Any = prometheus_client.Gauge,
        histogram: Any = prometheus_client.Histogram,
    ) -> None:
        self._labelvalues = labelvalues

        def counts(name: str, text: str, *labels: str) -> Any:
            return counter(
                name=f"vllm:bastion_{name}", documentation=text, labelnames=[*labelnames, *labels]
            )

        def latest(name: str, text: str, *labels: str) -> Any:
            return gauge(
                name=f"vllm:bastion_{name}",
                documentation=text,
                labelnames=[*labelnames, *labels],
                multiprocess_mode="mostrecent",
            )

        self._steps = counts("steps", "Steps by kind and reason.", "kind", "reason")
        self._nodes = histogram(
            name="vllm:bastion_nodes_verified",
            documentation="Nodes verified per tree.",
            labelnames=list(labelnames),
            buckets=[1 << i for i in range(NODE_BUCKETS)],
        )
        self._by_depth = counts(
            "accepted_by_depth", "Trees whose accepted path reaches this depth.", "depth"
        )
        self._nodes_by_source = counts(
            "nodes_by_source", "Nodes verified, by who proposed them.", "source"
        )
        self._accepted_by_source = counts(
            "accepted_by_source", "Draft tokens accepted, by who proposed them.", "source"
        )
        self._promised = counts(
            "promised_tokens", "Draft tokens expected to be accepted, the sum of path scores."
        )
        self._yielded = counts("yielded_tokens", "Draft tokens accepted of these same trees.")
        self._timed = counts("timed_steps", "Whole steps that were timed.", "kind", "rows")
        self._predicted = counts(
            "predicted_step_ms", "Predicted milliseconds of the timed steps.", "kind", "rows"
        )
        self._measured = counts(
            "measured_step_ms", "Measured milliseconds of the timed steps.", "kind", "rows"
        )
        self._plain_ms = counts(
            "plain_equivalent_ms",
            "Milliseconds that plain decoding is estimated to need for the decoded tokens.",
        )
        self._step_ms = counts(
            "decode_ms", "Milliseconds that the steps which decoded them are estimated to take."
        )
        self._gain = latest(
            "estimated_gain", "Estimated speed-up over plain decoding in the last minute."
        )
        self._correction = latest(
            "correction_factor", "Factor by which real steps differ from the profile.", "part"
        )
        self._profile_time = latest(
            "profile_timestamp_seconds", "When the step costs were measured, in Unix time."
        )

    def observe(self, delta: Totals, engine: int) -> None:
        """Add the sums of some steps of one engine."""
        own = self._labelvalues[engine]
        for (kind, reason), count in delta.steps.items():
            self._steps.labels(*own, kind, reason).inc(count)
        self._observe_nodes(self._nodes.labels(*own), delta)
        for depth, count in enumerate(delta.accepted_by_depth, start=1):
            self._by_depth.labels(*own, str(depth)).inc(count)
        if any(delta.sources):
            for i, source in enumerate(SOURCES):
                self._nodes_by_source.labels(*own, source).inc(delta.sources[i])
                accepted = delta.sources[len(SOURCES) + i]
                self._accepted_by_source.labels(*own, source).inc(accepted)
        for metric, amount in (
            (self._promised, delta.promised),
            (self._yielded, delta.yielded),
            (self._plain_ms, delta.plain_ms),
            (self._step_ms, delta.step_ms),
        ):
            metric.labels(*own).inc(amount)
        for (kind, rows), (count, predicted, measured) in delta.times.items():
            labels = *own, kind, str(rows)
            self._timed.labels(*labels).inc(count)
            self._predicted.labels(*labels).inc(predicted)
            self._measured.labels(*labels).inc(measured)
        for name, value in delta.now.items():
            if name == "gain":
                self._gain.labels(*own).set(value)
            elif name == "profile_time":
                self._profile_time.labels(*own).set(value)
            elif name in ("plain", "tree", "rows"):
                self._correction.labels(*own, name).set(value)

    @staticmethod
    def _observe_nodes(histogram: Any, delta: Totals) -> None:
        """Add trees to the histogram; it observes one value at a time, many of which are equal."""
        if isinstance(histogram, prometheus_client.Histogram):
            for bucket, count in zip(histogram._buckets, delta.trees_by_nodes):
                if count:
                    bucket.inc(count)
            histogram._sum.inc(delta.nodes)
            return
        # Ray's wrapper. The sum is then that of the buckets' bounds.
        for i, count in enumerate(delta.trees_by_nodes):
            for _ in range(count):
                histogram.observe(1 << i)
