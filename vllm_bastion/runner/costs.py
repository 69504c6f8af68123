# SPDX-License-Identifier: Apache-2.0
"""What the next step will cost, kept where the budget rule reads it.

``StepCosts`` joins a latency model (vLLM-free) with the trees' cost buffer: it installs the row of
the table that fits the batch and feeds real step times back to the model.
"""

from __future__ import annotations

from statistics import median

import numpy as np

from vllm_bastion.latency import LatencyModel
from vllm_bastion.runner.timing import StepTimer
from vllm_bastion.runner.trees import Trees
from vllm_bastion.step_cost import CostArray

# Steps whose median gives T_aux: everything of a step that calibration could not time.
_AUX_STEPS = 15


class StepCosts:
    """Cost of a whole step by its target rows, for the batch at hand."""

    def __init__(self, latency: LatencyModel, trees: Trees, *, online: bool) -> None:
        self.latency = latency
        # Under tensor parallelism every rank must see the same costs, so none learns its own.
        self.online = online
        self.timer = StepTimer(trees.device)
        self._trees = trees
        self._aux: list[float] = []
        self.aux_ms = 0.0
        self._installed: tuple[int, float] | None = None
        self._current: CostArray | None = None

    def install(self, num_reqs: int, context_len: float) -> None:
        """Make the trees' cost buffer the one of this batch; a copy only when it changed."""
        cost = self.latency.cycle_cost_ms(num_reqs, context_len)
        # The model hands out the same array while nothing has changed.
        state = (id(cost), self.aux_ms)
        if state != self._installed:
            self._installed = state
            self._current = cost  # keeps the id alive
            self._trees.set_cost_ms(cost + np.float32(self.aux_ms))

    def plain_ms(self, num_reqs: int, context_len: float) -> float:
        """Cost of a step without drafting. T_aux is taken to be the same: most of it is vLLM's."""
        return self.latency.plain_ms(num_reqs, context_len) + self.aux_ms

    def learn(self) -> None:
        """Take in the steps that were completed since the last call."""
        for step in self.timer.completed() if self.online else ():
            self.latency.observe(step.rows, step.num_reqs, step.context_len, step.forward_ms)
            if len(self._aux) < _AUX_STEPS:
                cycle = self.latency.cycle_cost_ms(step.num_reqs, step.context_len)
                rest = step.total_ms - float(cycle[min(step.rows, len(cycle) - 1)])
                self._aux.append(rest)
                if len(self._aux) == _AUX_STEPS:
                    self.aux_ms = max(0.0, median(self._aux))
