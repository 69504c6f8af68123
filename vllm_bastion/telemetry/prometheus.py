# SPDX-License-Identifier: Apache-2.0
"""The metrics `vllm:bastion_*`, explained in `docs/metrics.md`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import prometheus_client

from vllm_bastion.telemetry.counts import COUNTERS, Counts


class TreeMetrics:
    """Prometheus metrics of the engines that a front end talks to.

    Each of several front-end processes has these metrics, and Prometheus' multiprocess mode adds
    the counters up.

    Args:
        labelnames: labels of vLLM's own metrics.
        labelvalues: engine index -> their values.
        counter, gauge: classes of metrics; vLLM has others for Ray.
    """

    def __init__(
        self,
        labelnames: Sequence[str],
        labelvalues: Mapping[int, Sequence[object]],
        counter: Any = prometheus_client.Counter,
        gauge: Any = prometheus_client.Gauge,
    ) -> None:
        self._labelvalues = labelvalues
        self._counters = {
            name: counter(
                name=f"vllm:bastion_{name}", documentation=text, labelnames=[*labelnames, *labels]
            )
            for name, (text, *labels) in COUNTERS.items()
        }
        self._gain = gauge(
            name="vllm:bastion_measured_gain",
            documentation="Measured rate of the arm in use over that of plain decoding; NaN if "
            "unknown.",
            labelnames=[*labelnames],
            multiprocess_mode="mostrecent",
        )

    def observe(self, sums: Counts, gain: float | None, engine: int) -> None:
        """Add the sums of some steps of one engine, and set the gate's gain."""
        own = self._labelvalues[engine]
        for (name, *labels), amount in sums.items():
            if (counter := self._counters.get(name)) is not None:
                counter.labels(*own, *labels).inc(amount)
        self._gain.labels(*own).set(math.nan if gain is None else gain)
