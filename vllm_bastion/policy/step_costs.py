# SPDX-License-Identifier: Apache-2.0
"""What the next step will cost, kept where the budget rule reads it.

``StepCosts`` joins a latency model (vLLM-free) with the trees' cost buffer: it installs the row of
the table that fits the batch and feeds real step times back to the model.

T_aux, everything of a step that calibration could not time (sampling, tree building, compaction,
the host's part, waiting for N*), is what real steps take beyond their forward pass and the draft.
It is below zero where those take less than was measured: what decides is the step.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

import numpy as np

from vllm_bastion.policy.cost.online import LatencyModel
from vllm_bastion.policy.cost.table import CostArray
from vllm_bastion.policy.cost.timing import StepTimer
from vllm_bastion.policy.trees import Trees

# T_aux is a median over this many steps, and is looked at again every half of them.
_AUX_STEPS = 32
# The part of a measured cost by which T_aux may be below zero.
_MOST_LESS = 0.5


class AuxTime:
    """Milliseconds of T_aux: running medians, by the power of two of requests, and of all steps."""

    def __init__(self) -> None:
        self._all = _Median()
        self._by_size: dict[int, _Median] = {}

    def add(self, num_reqs: int, ms: float) -> None:
        """Take in one step. A pause between two requests is an outlier that the median ignores."""
        self._all.add(ms)
        self._by_size.setdefault(num_reqs.bit_length(), _Median()).add(ms)

    def of(self, num_reqs: int) -> float | None:
        """Of a batch of about so many requests, else of any; None until there are enough steps."""
        own = self._by_size.get(num_reqs.bit_length())
        if own is not None and own.ms is not None:
            return own.ms
        # Another batch's lead over what was measured for it is no lead of this one.
        return None if self._all.ms is None else max(self._all.ms, 0.0)


class _Median:
    def __init__(self) -> None:
        self.ms: float | None = None
        self._recent: deque[float] = deque(maxlen=_AUX_STEPS)
        self._new = 0

    def add(self, ms: float) -> None:
        self._recent.append(ms)
        self._new += 1
        if self._new >= _AUX_STEPS // 2:
            self._new = 0
            self.ms = median(self._recent)


class StepCosts:
    """Cost of a whole step by its target rows, for the batch at hand.

    Args:
        latency: what a forward pass costs.
        trees: holder of the cost buffer.
        online: whether real steps are timed and correct the costs.
    """

    def __init__(self, latency: LatencyModel, trees: Trees, *, online: bool) -> None:
        self.latency = latency
        self.timer = StepTimer(trees.device) if online else None
        self._trees = trees
        self._aux, self._plain_aux = AuxTime(), AuxTime()
        self._drafted = 0  # steps with a draft
        self._installed: tuple[int, float] | None = None
        self._current: CostArray | None = None

    def install(self, num_reqs: int, context_len: float) -> None:
        """Make the trees' cost buffer the one of this batch; a copy only when it changed."""
        cost = self.latency.cycle_cost_ms(num_reqs, context_len)
        # The model hands out the same array while nothing has changed.
        aux = max(self._aux.of(num_reqs) or 0.0, -_MOST_LESS * float(cost[0]))
        state = (id(cost), aux)
        if state != self._installed:
            self._installed = state
            self._current = cost  # keeps the id alive
            self._trees.set_cost_ms(cost + np.float32(aux))

    def plain_ms(self, num_reqs: int, context_len: float) -> float:
        """Cost of a step without drafting; infinite before the first drafts have shown T_aux.

        Calibration sees no scheduler. What that takes, it takes in both kinds of steps, and without
        it plain steps look better than they are.
        """
        drafting = self._aux.of(num_reqs)
        if self.timer is not None and drafting is None and self._drafted < _AUX_STEPS:
            return math.inf
        aux, plain = self._plain_aux.of(num_reqs), self.latency.plain_ms(num_reqs, context_len)
        if aux is None:  # like that of a step with a draft: most of T_aux is vLLM's own
            aux = max(drafting or 0.0, 0.0)
        return plain + max(aux, -_MOST_LESS * plain)

    def learn(self) -> None:
        """Take in the steps that were completed since the last call."""
        if self.timer is None:
            return
        for step in self.timer.completed():
            self._drafted += step.drafted
            if step.verified:
                self.latency.observe(step.rows, step.num_reqs, step.context_len, step.forward_ms)
            # A step from trees to plain decoding, or back, is neither.
            if step.total_ms is None or step.verified != step.drafted:
                continue
            if step.verified:
                beyond = self.latency.beyond_forward_ms(step.num_reqs)
                self._aux.add(step.num_reqs, step.total_ms - step.forward_ms - beyond)
            else:
                plain = self.latency.plain_ms(step.num_reqs, step.context_len)
                if self._plain_aux.of(step.num_reqs) is not None:
                    expected = self.plain_ms(step.num_reqs, step.context_len)
                    self.latency.follow(step.total_ms / expected)
                self._plain_aux.add(step.num_reqs, step.total_ms - plain)
