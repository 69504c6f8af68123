# SPDX-License-Identifier: Apache-2.0
"""How many draft nodes to verify: S(N) over the whole batch, on the host.

Best-first expansion sorts a tree's nodes by path score rho, and any prefix of them is a tree, so
the decision for a request is one number. Nodes of all requests compete by rho. With R requests and
`base_rows` rows that are not draft nodes (roots and prefill tokens), the n best nodes give

    S(n) = (R + sum of the n best rho) / C(base_rows + n)          tokens per millisecond

and N* = argmax S. For R = 1 this is the paper's S(N) without its constant L_AR.
`bastion_kernels.choose_budget` is the same rule on the device. Replay needs S itself, and the tests
compare the two.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vllm_bastion.policy.cost.table import CostArray


@dataclass(frozen=True)
class Budget:
    """The decision for one step."""

    # [R] int32, nodes to verify of each request (a prefix of its columns)
    counts: NDArray[np.int32]
    # expected tokens of the step: R + sum of the chosen rho
    expected_tokens: float
    # cost of the whole cycle at this size, ms
    cost_ms: float

    @property
    def num_nodes(self) -> int:
        """Draft nodes of the whole batch, N*."""
        return int(self.counts.sum())

    @property
    def tokens_per_ms(self) -> float:
        """S(N*)."""
        return self.expected_tokens / self.cost_ms


@dataclass(frozen=True)
class ScoreOrder:
    """Nodes of a batch from the highest path score down; ties keep the lower row first."""

    # [M] int64, batch row of each node
    rows: NDArray[np.int64]
    # [M + 1] float64, R + sum of the first n scores
    expected: NDArray[np.float64]
    num_reqs: int

    def counts(self, n: int) -> NDArray[np.int32]:
        """[R] int32: how many of the n best nodes each request owns."""
        return np.bincount(self.rows[:n], minlength=self.num_reqs).astype(np.int32)


def order_scores(rho: ArrayLike, limits: ArrayLike) -> ScoreOrder:
    """Sort the nodes of a batch.

    Args:
        rho: [R, N] path scores, each row non-increasing; unused columns 0.
        limits: [R] most nodes each request may have (its nodes in use and its remaining length).
    """
    scores = np.asarray(rho, dtype=np.float64)
    num_reqs, num_columns = scores.shape
    usable = np.arange(num_columns) < np.asarray(limits)[:, None]
    flat = np.flatnonzero(usable)
    values = scores.ravel()[flat]
    order = np.argsort(-values, kind="stable")
    expected = np.empty(len(order) + 1)
    expected[0] = num_reqs
    np.cumsum(values[order], out=expected[1:])
    expected[1:] += num_reqs
    return ScoreOrder(flat[order] // max(num_columns, 1), expected, num_reqs)


def speedup_curve(order: ScoreOrder, cost_ms: CostArray, base_rows: int) -> NDArray[np.float64]:
    """S(n) for n = 0 .. as many nodes as there are and the cost table reaches.

    If the other rows alone exceed the table (a long prompt chunk), the step gets no draft nodes.
    """
    base_rows = min(base_rows, len(cost_ms) - 1)
    top = min(len(order.rows), len(cost_ms) - 1 - base_rows)
    cost = cost_ms[base_rows : base_rows + top + 1].astype(np.float64)
    return order.expected[: top + 1] / cost


def best_size(curve: NDArray[np.float64]) -> int:
    """N* on a curve S(0..n); the smallest of equals."""
    return int(np.argmax(curve))


def choose_budget(
    rho: ArrayLike,
    limits: ArrayLike,
    cost_ms: CostArray,
    base_rows: int,
) -> Budget:
    """The budget of a batch whose nodes compete for one step (see the module).

    Args:
        rho: [R, N] path scores, each row non-increasing.
        limits: [R] most nodes each request may have.
        cost_ms: [rows + 1] cost of a cycle by total target rows.
        base_rows: rows of the step that are not draft nodes, roots included.
    """
    order = order_scores(rho, limits)
    n = best_size(speedup_curve(order, cost_ms, base_rows))
    return budget_of(order, n, cost_ms, base_rows)


def budget_of(order: ScoreOrder, n: int, cost_ms: CostArray, base_rows: int) -> Budget:
    """The budget of the `n` best nodes."""
    row = min(base_rows + n, len(cost_ms) - 1)
    return Budget(order.counts(n), float(order.expected[n]), float(cost_ms[row]))
