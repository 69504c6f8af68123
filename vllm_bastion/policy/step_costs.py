# SPDX-License-Identifier: Apache-2.0
"""What the next step costs, in the buffer that the budget rule reads.

``StepCosts`` connects a latency model with the trees' cost buffer: it installs the costs of the
current batch, and it passes the times of real steps to the model.
"""

from __future__ import annotations

from collections.abc import Callable

from vllm_bastion.policy.cost.online import LatencyModel, StepEstimate
from vllm_bastion.policy.cost.table import CostArray, context_bucket
from vllm_bastion.policy.cost.timing import StepTimer, StepTimes
from vllm_bastion.policy.trees import Trees

# Steps that are learned from together. A forward pass evicts this code from a CPU's caches: on the
# tiny pair, learning from every step took 17 us a step with four together and 30 us alone.
_TOGETHER = 4


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
        self._num_reqs = 1
        # The context and the spared positions that `current` is of, and whether nothing was
        # learned since.
        self._bucket, self._spared, self._is_current = -1, 0, False
        # Told of each whole step that was timed: whether it verified drafts, its rows, and its
        # predicted and measured milliseconds.
        self.on_step: Callable[[bool, int, float, float], None] | None = None
        self.current = StepEstimate(trees.cost_ms_host, float(trees.cost_ms_host[1]))

    def install(self, num_reqs: int, context_len: float, spared: int = 0) -> None:
        """Write the costs of this batch to the trees' cost buffer, if they differ from it.

        See `LatencyModel.estimate`.
        """
        batch = num_reqs, context_bucket(context_len), spared
        if self._is_current and batch == (self._num_reqs, self._bucket, self._spared):
            return
        self._num_reqs, self._bucket, self._spared = batch
        self._is_current = True
        self.current = self.latency.estimate(num_reqs, context_len, spared)
        # N* does not depend on a common factor of all costs.
        if self.current.curve is not self._installed:
            self._installed = self.current.curve
            self._trees.set_cost_ms(self._installed)

    def learn(self, *, at_once: bool = True) -> None:
        """Learn from the steps that were completed since; unless `at_once`, from a few together.

        Of plain steps in a row, the last one speaks for those before it.
        """
        if self.timer is not None and (at_once or self.timer.num_pending >= _TOGETHER):
            steps, passed = list(self.timer.completed()), 0
            for i, step in enumerate(steps, 1):
                passed += 1
                if i < len(steps) and _same_plain(step, steps[i]):
                    continue
                if self.on_step is not None:
                    self._report(step, self.on_step)
                self.latency.observe(step, passed)
                self._is_current, passed = False, 0

    def _report(self, step: StepTimes, on_step: Callable[[bool, int, float, float], None]) -> None:
        # A step that only verifies or only drafts is of neither kind.
        if step.total_ms is None or step.verified != step.drafted:
            return
        cost = self.current
        if (step.num_reqs, step.spared) != (self._num_reqs, self._spared):
            cost = self.latency.estimate(step.num_reqs, step.context_len, step.spared)
        predicted = cost.tree_step_ms(step.rows) if step.verified else cost.plain_ms
        on_step(step.verified, step.rows, predicted, step.total_ms)

    def correction(self) -> dict[str, float]:
        """The factors of the batch that was installed last, see `LatencyModel.correction`."""
        return self.latency.correction(self._num_reqs)


def _same_plain(step: StepTimes, following: StepTimes) -> bool:
    """Whether both are plain steps of as many requests: the later one tells the same."""
    drafts = step.verified or step.drafted or following.verified or following.drafted
    return not drafts and step.num_reqs == following.num_reqs
