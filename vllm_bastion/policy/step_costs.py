# SPDX-License-Identifier: Apache-2.0
"""What the next step costs, in the buffer that the budget rule reads.

``StepCosts`` connects a latency model with the trees' cost buffer: it installs the costs of the
current batch, and it feeds the times of real steps back to the model.

T_aux is what a real step takes beyond its forward pass and its draft, as far as calibration could
not time it: sampling, tree building, compaction, the host's work, waiting for N*. It is negative if
real steps take less than the profile says: what counts is the time of the whole step.
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

# T_aux is the median of this many steps, and is updated after every half as many.
_AUX_STEPS = 32
# T_aux may lower a measured cost by at most this fraction of it.
_MAX_REDUCTION = 0.5


class AuxTime:
    """T_aux in milliseconds: running medians, by powers of two of requests and over all steps."""

    def __init__(self) -> None:
        self._all = _Median()
        self._by_size: dict[int, _Median] = {}

    def add(self, num_reqs: int, ms: float) -> None:
        """Add one step. A pause between requests is an outlier, which the median ignores."""
        self._all.add(ms)
        self._by_size.setdefault(num_reqs.bit_length(), _Median()).add(ms)

    def ms(self, num_reqs: int) -> float | None:
        """T_aux of batches of about this size, else of all steps; None until there are enough."""
        own = self._by_size.get(num_reqs.bit_length())
        if own is not None and own.ms is not None:
            return own.ms
        # Never apply another batch size's negative correction.
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
    """Cost of a whole step by its target rows, for the current batch.

    Args:
        latency: estimates the cost of a step.
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
        """Write the costs of this batch to the trees' cost buffer, if they differ from it."""
        cost = self.latency.cycle_cost_ms(num_reqs, context_len)
        # The model returns the same array until its costs change.
        aux = max(self._aux.ms(num_reqs) or 0.0, -_MAX_REDUCTION * float(cost[0]))
        state = (id(cost), aux)
        if state != self._installed:
            self._installed = state
            self._current = cost  # no other array gets its id while this one lives
            self._trees.set_cost_ms(cost + np.float32(aux))

    def plain_ms(self, num_reqs: int, context_len: float) -> float:
        """Cost of a step without drafting; infinite until the first drafts have shown T_aux.

        Calibration runs without a scheduler. The scheduler's time is part of both kinds of step:
        without it, plain steps would look cheaper than they are.
        """
        drafting = self._aux.ms(num_reqs)
        if self.timer is not None and drafting is None and self._drafted < _AUX_STEPS:
            return math.inf
        aux, plain = self._plain_aux.ms(num_reqs), self.latency.plain_ms(num_reqs, context_len)
        if aux is None:
            # Most of T_aux is vLLM's own time, which a step with a draft has as well.
            aux = max(drafting or 0.0, 0.0)
        return plain + max(aux, -_MAX_REDUCTION * plain)

    def learn(self) -> None:
        """Learn from the steps that were completed since the last call."""
        if self.timer is None:
            return
        for step in self.timer.completed():
            self._drafted += step.drafted
            if step.verified:
                self.latency.observe(step.rows, step.num_reqs, step.context_len, step.forward_ms)
            # A step that only verifies or only drafts is neither a tree step nor a plain one.
            if step.total_ms is None or step.verified != step.drafted:
                continue
            if step.verified:
                beyond = self.latency.beyond_forward_ms(step.num_reqs)
                self._aux.add(step.num_reqs, step.total_ms - step.forward_ms - beyond)
            else:
                plain = self.latency.plain_ms(step.num_reqs, step.context_len)
                if self._plain_aux.ms(step.num_reqs) is not None:
                    expected = self.plain_ms(step.num_reqs, step.context_len)
                    self.latency.observe_plain(step.total_ms / expected)
                self._plain_aux.add(step.num_reqs, step.total_ms - plain)
