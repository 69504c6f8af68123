# SPDX-License-Identifier: Apache-2.0
"""Our metrics in a registry of their own."""

from __future__ import annotations

from typing import Any

import prometheus_client

from vllm_bastion.telemetry.prometheus import TreeMetrics


def registered(values: dict[int, list[str]]) -> tuple[prometheus_client.CollectorRegistry, Any]:
    """A new registry, and metrics in it. values: labels "model_name" and "engine", by engine."""
    registry = prometheus_client.CollectorRegistry()

    def of(kind: Any) -> Any:
        class Registered(kind):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **{"registry": registry, **kwargs})

        return Registered

    kinds = (prometheus_client.Counter, prometheus_client.Gauge)
    return registry, TreeMetrics(["model_name", "engine"], values, *map(of, kinds))
