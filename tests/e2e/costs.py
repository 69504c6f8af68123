# SPDX-License-Identifier: Apache-2.0
"""Step costs that a test gives an engine in place of measured ones."""

from __future__ import annotations

from typing import Any

from benchmarks.replay.costs import numbers_of, table_of
from vllm_bastion.policy.cost.table import StepCostTable

# Of an engine whose test does not depend on costs: measuring takes longer than all else in it.
USUAL = numbers_of(StepCostTable.linear(10.0, 0.2, max_rows=512))


def given_costs(table: StepCostTable) -> dict[str, Any]:
    """Keys for `Engine.with_bastion`: the costs of `table`, which real steps do not correct."""
    return {"costs": numbers_of(table), "latency_model": "table"}


def install(spec: dict[str, Any]) -> None:
    """Give this process's engine, and processes forked from here, the costs of its spec, if any."""
    costs = spec.get("costs")
    if costs is None:
        return
    from vllm_bastion.calibration import engine

    engine.measure = lambda runner, *_: table_of(costs, runner.max_num_tokens)
