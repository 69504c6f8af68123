# SPDX-License-Identifier: Apache-2.0
"""Latency estimators: what the controller believes one cycle costs.

`LatencyModel` is the seam between what is measured and what is decided. `table` answers from the
measured step-cost table and learns nothing online.
"""

from __future__ import annotations

from typing import Protocol

from vllm_bastion.step_cost import CostArray, StepCostTable


class LatencyModel(Protocol):
    """Cost of one cycle, by total target rows."""

    def cycle_cost_ms(self, num_reqs: int, context_len: float) -> CostArray:
        """[max_rows + 1] float32 ms of a whole cycle (forward + drafter + T_aux).

        Entry n is for n target rows (roots, nodes and prefill tokens); `context_len` is the mean
        number of cached tokens per request. Finite, positive, non-decreasing, read-only.
        """
        ...

    def plain_ms(self, num_reqs: int, context_len: float) -> float:
        """Milliseconds of a step that neither drafts nor verifies."""
        ...

    def observe(self, rows: int, num_reqs: int, context_len: float, measured_ms: float) -> None:
        """Take in one real step.

        Args:
            rows: target rows of the step.
            num_reqs: requests in it.
            context_len: mean cached tokens per request.
            measured_ms: the target's forward time, the same span as in the table's samples
                (never the whole cycle: a factor on the whole cycle changes no decision).
        """
        ...


class TableLatency:
    """`table`: the measured step-cost table, fixed."""

    def __init__(self, table: StepCostTable) -> None:
        self.table = table

    def cycle_cost_ms(self, num_reqs: int, context_len: float) -> CostArray:
        """See `LatencyModel`."""
        return self.table.cost_ms(num_reqs, context_len)

    def plain_ms(self, num_reqs: int, context_len: float) -> float:
        """See `LatencyModel`."""
        return self.table.plain_ms(num_reqs, context_len)

    def observe(self, rows: int, num_reqs: int, context_len: float, measured_ms: float) -> None:
        """Nothing: the table is what was measured at start-up."""
