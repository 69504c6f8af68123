# SPDX-License-Identifier: Apache-2.0
"""How many draft nodes to verify: the rule of `engine.budget`, for a whole batch at once.

Best-first expansion sorts a tree's nodes by path score rho, and any prefix of them is a tree, so
the decision for a request is one number. Nodes of all requests compete by rho. With R requests and
`base_rows` rows that are not draft nodes (roots and prefill tokens), the n best nodes give

    S(n) = (R + sum of the n best rho) / C(base_rows + n)          tokens per millisecond

and N* = argmax S, the smallest of equals.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True)
class Budget:
    """The decision for one step."""

    # [R] int32, nodes to verify of each request (a prefix of its columns)
    counts: NDArray[np.int32]
    # expected tokens of the step: R + sum of the chosen rho
    expected_tokens: float

    @property
    def num_nodes(self) -> int:
        """Draft nodes of the whole batch, N*."""
        return int(self.counts.sum())


def choose_budget(
    rho: ArrayLike, limits: ArrayLike, cost_ms: ArrayLike, base_rows: int, total: int | None = None
) -> Budget:
    """The budget of a batch whose nodes compete for one step (see the module).

    If the other rows alone exceed the cost table (a long prompt chunk), there are no draft nodes.

    Args:
        rho: [R, N] path scores, each row non-increasing; unused columns 0.
        limits: [R] most nodes each request may have (its nodes in use and its remaining length).
        cost_ms: [rows + 1] cost of a cycle by total target rows.
        base_rows: rows of the step that are not draft nodes, roots included.
        total: N, where it is settled already.
    """
    scores = np.asarray(rho, dtype=np.float64)
    num_reqs, num_columns = scores.shape
    flat = np.flatnonzero(np.arange(num_columns) < np.asarray(limits)[:, None])
    order = np.argsort(-scores.ravel()[flat], kind="stable")  # ties: the lower row first
    owners = flat[order] // max(num_columns, 1)
    expected = num_reqs + np.concatenate([[0.0], np.cumsum(scores.ravel()[flat][order])])
    costs = np.asarray(cost_ms, dtype=np.float64)
    base_rows = min(base_rows, len(costs) - 1)
    most = min(len(owners), len(costs) - 1 - base_rows)
    if total is None:
        total = int(np.argmax(expected[: most + 1] / costs[base_rows : base_rows + most + 1]))
    total = min(total, most)
    counts = np.bincount(owners[:total], minlength=num_reqs).astype(np.int32)
    return Budget(counts, float(expected[total]))
