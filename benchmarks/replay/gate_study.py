# SPDX-License-Identifier: Apache-2.0
"""Never slower: the gate against the better of plain decoding and the best fixed budget.

What steps really cost differs from the calibrated costs that the controller starts from, by a
factor on each kind of step, and is measured with noise and stalls. The controller must find out
which kind pays while it decodes, and the first requests after a start must not pay for that.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.replay.costs import CostSource
from benchmarks.replay.policies import Adaptive, Fixed, Plain
from benchmarks.replay.simulation import Corpus, Policy, Request, Truth, simulate

# Factors on plain steps and on steps with trees.
CASES = {
    "as calibrated": (1.0, 1.0),
    "plain steps 0.6": (0.6, 1.0),
    "trees 2.0": (1.0, 2.0),
    "trees 3.0": (1.0, 3.0),
    "plain steps 1.5": (1.5, 1.0),
}
BATCHES = (1, 4, 16)
MAX_NODES = 64
_BUDGETS = (4, 8, 16, 32, 64)
_NOISE, _STALLS = 0.15, 0.01
# Of the study of a start: requests, those decoded before they are repeated, and orders.
FIRST, _BETWEEN, _ORDERS = 9, 40, 12
# Requests of a hard start, at least.
_FIRST_HARD = 4


def gate_study(
    corpus: Corpus, source: CostSource, *, hard_start: bool = False
) -> list[dict[str, Any]]:
    """Time of the better of plain decoding and the best fixed budget, over the time of adaptive.

    hard_start: the requests that accept least come first, before all of them: what a server learns
    from them must not be held against those that follow.

    Returns:
        A row for each case and batch: `fixed / plain`, the best fixed budget's speed; then the
        shares that exact and lagged timing reach, and those of several ranks, lagged: which learn
        from rank 0's times, or from none; and that of trees in every step. 1 is as fast as the best
        choice in hindsight.
    """
    rows = []
    hardest = _hardest_first(corpus, source) if hard_start else []
    for case, (plain_factor, tree_factor) in CASES.items():
        for batch in BATCHES:
            requests = hardest[: max(_FIRST_HARD, batch)]
            requests += corpus.interleaved() * max(1, batch // 8)

            def milliseconds(
                policy: Policy,
                plain: float = plain_factor,
                tree: float = tree_factor,
                requests: Any = requests,
                batch: int = batch,
            ) -> float:
                truth = Truth(source.table, plain=plain, tree=tree, noise=_NOISE, stalls=_STALLS)
                return simulate(corpus, policy, truth, requests=requests, batch=batch).ms

            def adaptive(**options: Any) -> Policy:
                latency = source.latency("ema_table")
                return Adaptive(corpus, latency, max_nodes=MAX_NODES, **options)

            plain_ms = milliseconds(Plain())
            fixed_ms = min(milliseconds(Fixed(corpus, n)) for n in _BUDGETS)
            best = min(plain_ms, fixed_ms)
            rows.append(
                {
                    "really": case,
                    "batch": batch,
                    "fixed / plain": plain_ms / fixed_ms,
                    "exact": best / milliseconds(adaptive()),
                    "lagged": best / milliseconds(adaptive(timing="lagged")),
                    "rank 0's times": best
                    / milliseconds(adaptive(timing="lagged", times="rank 0")),
                    "no times": best / milliseconds(adaptive(timing="lagged", times="none")),
                    "always drafting": best / milliseconds(adaptive(plain=False)),
                }
            )
    return rows


def _hardest_first(corpus: Corpus, source: CostSource) -> list[Request]:
    """All requests, first those that accept least of trees of 8 nodes."""

    def tau(request: Request) -> float:
        return simulate(corpus, Fixed(corpus, 8), Truth(source.table), requests=[request]).tau

    return sorted(corpus.interleaved(), key=tau)


def start_study(corpus: Corpus, source: CostSource) -> list[dict[str, Any]]:
    """Time of the first requests after a start, over that of the same ones later.

    Returns:
        A row for each case, one request at a time: `first / later` of the controller, over several
        orders of the requests; then `first / best`, over plain decoding or the best fixed budget.
    """
    rows = []
    for case, (plain_factor, tree_factor) in CASES.items():
        times = np.zeros(3)
        for order in range(_ORDERS):
            requests = list(corpus.requests)
            np.random.default_rng(order).shuffle(requests)
            first, others = requests[:FIRST], requests[FIRST : FIRST + _BETWEEN]

            def milliseconds(
                policy: Policy,
                decoded: list[Request],
                plain: float = plain_factor,
                tree: float = tree_factor,
                seed: int = order,
            ) -> float:
                truth = Truth(source.table, None, plain, tree, _NOISE, _STALLS, seed)
                return simulate(corpus, policy, truth, requests=decoded).ms

            fixed = (milliseconds(Fixed(corpus, n), first) for n in _BUDGETS)
            policy = Adaptive(corpus, source.latency("ema_table"), max_nodes=MAX_NODES)
            early = milliseconds(policy, first)
            milliseconds(policy, others)
            late = milliseconds(policy, first)
            times += early, late, min(milliseconds(Plain(), first), *fixed)
        rows.append({"really": case, "first / later": times[0] / times[1],
                     "first / best": times[0] / times[2]})  # fmt: skip
    return rows
