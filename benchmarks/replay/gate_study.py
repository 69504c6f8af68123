# SPDX-License-Identifier: Apache-2.0
"""Never slower: the gate against the better of plain decoding and the best fixed budget.

What steps really cost differs from the calibrated costs that the controller starts from, by a
factor on each kind of step, and is measured with noise and stalls. The controller must find out
which kind pays while it decodes.
"""

from __future__ import annotations

from typing import Any

from benchmarks.replay.costs import CostSource
from benchmarks.replay.policies import Adaptive, Fixed, Plain
from benchmarks.replay.simulation import Corpus, Policy, Truth, simulate

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


def gate_study(corpus: Corpus, source: CostSource) -> list[dict[str, Any]]:
    """Time of the better of plain decoding and the best fixed budget, over the time of adaptive.

    Returns:
        A row for each case and batch: `fixed / plain`, the best fixed budget's speed; then the
        shares that exact and lagged timing reach, and that of trees in every step. 1 is as fast as
        the best choice in hindsight.
    """
    rows = []
    for case, (plain_factor, tree_factor) in CASES.items():
        for batch in BATCHES:
            requests = corpus.interleaved() * max(1, batch // 8)

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
                    "always drafting": best / milliseconds(adaptive(plain=False)),
                }
            )
    return rows
