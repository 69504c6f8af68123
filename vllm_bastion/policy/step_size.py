# SPDX-License-Identifier: Apache-2.0
"""Lagged timing: the nodes of a step whose scores the host has not seen.

By an earlier step's scores, N nodes of T trees were best in a step of T roots and nothing else.
Such a step verifies N nodes again. For any other step, n nodes of t trees are estimated to yield

    G(n) = G t/T (n T / (N t))^0.2

accepted draft tokens. G is the estimate for the N nodes; the exponent was fitted to tau of fixed
budgets of 8 to 256 nodes (tiny pair). n maximises

    (R + G(n)) / (C(R) + C(base + n) - C(base))

where base is the number of rows that are not nodes. Candidates are N and the CUDA graph sizes next
to it, and with prompts also fractions of N. Prompt rows must be computed in any case, so their time
does not influence the number of nodes.
"""

from __future__ import annotations

import numpy as np

from vllm_bastion.policy.cost.table import CostArray

_POWER = 0.2
# Of the number of nodes, tried in a step with prompts.
_FRACTIONS = np.arange(1, 9) / 8


class StepSize:
    """Sizes the next step by the last scores that arrived."""

    def __init__(self) -> None:
        self._nodes: int | None = None
        self._trees, self._tokens = 1, 0.0

    def observe(self, nodes: int, trees: int, tokens: float) -> None:
        """By the scores of a batch, `nodes` nodes of its `trees` >= 1 trees are best.

        tokens: expected accepted draft tokens among these nodes.
        """
        self._nodes, self._trees, self._tokens = nodes, trees, tokens

    def choose(
        self,
        trees: int,
        num_reqs: int,
        base_rows: int,
        most: int,
        cost: CostArray,
        graphs: np.ndarray,
    ) -> int:
        """Nodes of the step, 0 to `most`.

        Args:
            trees: requests that may have nodes.
            num_reqs: R.
            base_rows: rows that are not nodes, at least R.
            most: nodes that the requests and the buffers allow.
            cost: C, see `StepEstimate.curve`.
            graphs: [G] ascending sizes of CUDA graphs; may be empty.
        """
        most = min(most, len(cost) - 1 - base_rows)
        if not trees or most <= 0 or self._nodes == 0:
            return 0
        room = graphs[graphs > base_rows] - base_rows
        if self._nodes is None:  # before the first scores: one whole tree, within the graphs
            return min(most, -(-most // trees), *room[-1:].tolist())
        if trees == self._trees and base_rows == num_reqs:
            return min(self._nodes, most)
        # A batch that grew keeps its number of nodes until its own scores arrive: a few requests
        # have many nodes each, and with as many for each request a large batch's step takes long.
        scaled = self._nodes * min(1.0, trees / self._trees)
        sizes = scaled * (_FRACTIONS if base_rows > num_reqs else _FRACTIONS[-1:])
        if len(room):  # also the sizes that fill the next graph above and below
            above = np.searchsorted(room, sizes)
            sizes = np.concatenate([sizes, room[np.minimum(above, len(room) - 1)]])
            sizes = np.concatenate([sizes, room[np.maximum(above - 1, 0)]])
        sizes = np.minimum(np.round(sizes), most).astype(np.int64)
        alike = self._nodes * trees / self._trees
        gain = self._tokens * trees / self._trees * (sizes / alike) ** _POWER
        ms = cost[num_reqs] + cost[base_rows + sizes] - cost[base_rows]
        return int(sizes[np.argmax((num_reqs + gain) / ms)])
