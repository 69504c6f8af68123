# SPDX-License-Identifier: Apache-2.0
"""What the next step costs, in the buffer that the budget rule reads.

``StepCosts`` connects a latency model with the trees' cost buffer: it installs the costs of the
current batch, and it passes the times of real steps to the model.
"""

from __future__ import annotations

from vllm_bastion.policy.cost.online import LatencyModel, StepEstimate
from vllm_bastion.policy.cost.table import CostArray
from vllm_bastion.policy.cost.timing import StepTimer
from vllm_bastion.policy.trees import Trees


class StepCosts:
    """Cost of a whole step, for the current batch.

    Args:
        latency: estimates the cost of a step.
        trees: holder of the cost buffer.
        online: whether real steps are timed and correct the costs.
    """

    def __init__(self, latency: LatencyModel, trees: Trees, *, online: bool) -> None:
        self.latency = latency
        self.timer = StepTimer(trees.device) if online else None
        self._trees = trees
        self._installed: CostArray | None = None
        self.current = StepEstimate(trees.cost_ms_host, float(trees.cost_ms_host[1]))

    def install(self, num_reqs: int, context_len: float) -> None:
        """Write the costs of this batch to the trees' cost buffer, if they differ from it."""
        self.current = self.latency.estimate(num_reqs, context_len)
        # The model returns the same array until its costs change.
        if self.current.tree_ms is not self._installed:
            self._installed = self.current.tree_ms
            self._trees.set_cost_ms(self._installed)

    def learn(self) -> None:
        """Learn from the steps that were completed since the last call."""
        if self.timer is not None:
            for step in self.timer.completed():
                self.latency.observe(step)
