# SPDX-License-Identifier: Apache-2.0
"""The interface between measuring and deciding: what one step of speculative decoding costs."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from vllm_bastion.step_times import StepTimes

LatencyName = Literal["table", "ema_table", "static", "ema", "ema_calib"]
CostArray = NDArray[np.float32]

# Steps without a plain one after which the cost of plain steps is doubtful.
STALE = 64


class StepEstimate(NamedTuple):
    """What the next step of a batch costs, of either kind."""

    # [max_rows + 1] float32, entry n for n target rows (roots, nodes and prompt tokens): ms of a
    # whole step with trees, divided by `factor`. Finite, positive, non-decreasing and read-only;
    # the same object until it changes. N* depends on nothing else.
    curve: CostArray
    # ms of a step that neither drafts, nor verifies, nor looks for copies.
    plain_ms: float
    # ms of a step that verifies copies alone, with one row for each request.
    copies_ms: float
    factor: float = 1.0
    # ms that a plain step takes longer if it looks for copies.
    look_ms: float = 0.0

    def tree_step_ms(self, rows: int) -> float:
        """ms of a step with trees and `rows` target rows."""
        return self.factor * float(self.curve[min(rows, len(self.curve) - 1)])

    @property
    def tree_ms(self) -> CostArray:
        """[max_rows + 1] float32 ms: `tree_step_ms` of every number of rows."""
        return (self.factor * self.curve).astype(np.float32)


class LatencyModel(Protocol):
    """Cost of a step, by its total target rows."""

    def estimate(self, num_reqs: int, context_len: float, spared: int = 0) -> StepEstimate:
        """The next step's cost.

        Args:
            num_reqs: requests that decode in the step.
            context_len: mean cached tokens per request.
            spared: positions of its block that the drafter does not predict.
        """
        ...

    def observe(self, step: StepTimes, passed: int = 1) -> None:
        """Learn from a completed step, the last of `passed` steps since the one observed before."""
        ...

    def plain_age(self, num_reqs: int) -> float:
        """Steps of such a batch that were timed since its last plain one.

        Infinite if there was none, 0 if plain steps are not learned from.
        """
        ...

    def correction(self, num_reqs: int) -> dict[str, float]:
        """Factors by which real steps of such a batch differ from the table; empty without.

        "plain": plain steps. "copies", "tree": steps of copies, and of drafts, with one row for
        each request. "rows": what further rows add, beyond "tree".
        """
        ...
