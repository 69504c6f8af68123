# SPDX-License-Identifier: Apache-2.0
"""The metrics `vllm:bastion_*`, explained in `docs/metrics.md`.

Sums are in milliseconds, not in seconds: `llm.get_metrics()` truncates counters to integers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import prometheus_client

from vllm_bastion.telemetry.record import NODE_BUCKETS, SOURCES, Totals

# Name -> what it counts, and its labels in addition to those of vLLM's own metrics.
_COUNTERS: dict[str, tuple[str, ...]] = {
    "steps": ("Steps by kind and reason.", "kind", "reason"),
    "accepted_by_depth": ("Trees whose accepted path reaches this depth.", "depth"),
    "nodes_by_source": ("Nodes verified, by who proposed them.", "source"),
    "accepted_by_source": ("Draft tokens accepted, by who proposed them.", "source"),
    "promised_tokens": ("Draft tokens expected to be accepted, the sum of path scores.",),
    "yielded_tokens": ("Draft tokens accepted from the same trees.",),
    "timed_steps": ("Whole steps that were timed.", "kind", "rows"),
    "predicted_step_ms": ("Predicted milliseconds of the timed steps.", "kind", "rows"),
    "measured_step_ms": ("Measured milliseconds of the timed steps.", "kind", "rows"),
    "plain_equivalent_ms": (
        "Milliseconds that plain decoding is estimated to need for the decoded tokens.",
    ),
    "decode_ms": ("Estimated milliseconds of the steps that decoded these tokens.",),
}
_GAUGES: dict[str, tuple[str, ...]] = {
    "estimated_gain": ("Estimated speed-up over plain decoding in the last minute.",),
    "correction_factor": ("Factor by which real steps differ from the measured costs.", "part"),
}


class TreeMetrics:
    """Prometheus metrics of the engines that a front end talks to.

    Each of several front-end processes has these metrics, and Prometheus' multiprocess mode adds
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

        def make(kind: Any, name: str, text: str, *labels: str, **options: Any) -> Any:
            return kind(
                name=f"vllm:bastion_{name}",
                documentation=text,
                labelnames=[*labelnames, *labels],
                **options,
            )

        self._counters = {
            name: make(counter, name, text, *labels) for name, (text, *labels) in _COUNTERS.items()
        }
        self._gauges = {
            name: make(gauge, name, text, *labels, multiprocess_mode="mostrecent")
            for name, (text, *labels) in _GAUGES.items()
        }
        buckets = [1 << i for i in range(NODE_BUCKETS)]
        self._nodes = make(histogram, "nodes_verified", "Nodes verified per tree.", buckets=buckets)

    def observe(self, delta: Totals, engine: int) -> None:
        """Add the sums of some steps of one engine."""
        own = self._labelvalues[engine]

        def count(name: str, amount: float, *labels: str) -> None:
            self._counters[name].labels(*own, *labels).inc(amount)

        for (kind, reason), steps in delta.steps.items():
            count("steps", steps, kind, reason)
        self._observe_nodes(self._nodes.labels(*own), delta)
        for depth, trees in enumerate(delta.accepted_by_depth, start=1):
            count("accepted_by_depth", trees, str(depth))
        if any(delta.sources):
            for i, source in enumerate(SOURCES):
                count("nodes_by_source", delta.sources[i], source)
                count("accepted_by_source", delta.sources[len(SOURCES) + i], source)
        count("promised_tokens", delta.promised)
        count("yielded_tokens", delta.yielded)
        count("plain_equivalent_ms", delta.plain_ms)
        count("decode_ms", delta.step_ms)
        for (kind, rows), (steps, predicted, measured) in delta.times.items():
            count("timed_steps", steps, kind, str(rows))
            count("predicted_step_ms", predicted, kind, str(rows))
            count("measured_step_ms", measured, kind, str(rows))
        for name, value in delta.now.items():
            if name == "gain":
                self._gauges["estimated_gain"].labels(*own).set(value)
            else:
                self._gauges["correction_factor"].labels(*own, name).set(value)

    @staticmethod
    def _observe_nodes(histogram: Any, delta: Totals) -> None:
        """Add trees to the histogram, which only takes one value at a time; many are equal."""
        if isinstance(histogram, prometheus_client.Histogram):
            for bucket, count in zip(histogram._buckets, delta.trees_by_nodes):
                if count:
                    bucket.inc(count)
            histogram._sum.inc(delta.nodes)
            return
        # Ray's wrapper. The histogram's sum is then that of the buckets' bounds.
        for i, count in enumerate(delta.trees_by_nodes):
            for _ in range(count):
                histogram.observe(1 << i)
