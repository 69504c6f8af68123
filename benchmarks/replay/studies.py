# SPDX-License-Identifier: Apache-2.0
"""The studies of a recording: each a function from a corpus, costs and policies to numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.replay.costs import CostSource
from benchmarks.replay.policies import Fixed, Gated, Plain
from benchmarks.replay.simulation import Corpus, Policy, Request, Truth, simulate

# A policy for a corpus and costs, made anew for each replay because it learns.
Maker = Callable[[Corpus, CostSource], Policy]

# Of the gate: factors on plain steps and on steps with trees, batches, budgets, and most nodes.
_REALLY = {
    "as calibrated": (1.0, 1.0),
    "plain steps 0.6": (0.6, 1.0),
    "trees 2.0": (1.0, 2.0),
    "trees 3.0": (1.0, 3.0),
    "plain steps 1.5": (1.5, 1.0),
}
_GATE_BATCHES, _GATE_BUDGETS, _GATE_NODES = (1, 4, 16), (4, 8, 16, 32, 64), 64
_NOISE, _STALLS = 0.15, 0.01
# Factors on plain steps and on trees in the first half of a replay, and in the second half.
_CHANGES = {
    "trees 3.0, then 1.0": ((1.0, 3.0), (1.0, 1.0)),
    "trees 1.0, then 3.0": ((1.0, 1.0), (1.0, 3.0)),
    "plain steps 0.6, then 1.5": ((0.6, 1.0), (1.5, 1.0)),
    "one domain after the other": ((1.0, 1.0), (1.0, 1.0)),
}


def _gated(lagged: bool) -> Maker:
    def make(corpus: Corpus, source: CostSource) -> Policy:
        return Gated(corpus, source.table, max_nodes=_GATE_NODES, lagged=lagged)

    return make


# What the product does: exact where the host can wait for a step's scores, lagged on a GPU.
PRODUCT: dict[str, Maker] = {"exact": _gated(False), "lagged": _gated(True)}


def gate_study(
    corpus: Corpus,
    source: CostSource,
    policies: Mapping[str, Maker] = PRODUCT,
    seeds: Sequence[int] = (0,),
) -> list[dict[str, Any]]:
    """Never slower: policies against the better of plain decoding and the best fixed budget.

    What steps really cost differs from the calibrated costs that a policy starts from, by a factor
    on each kind of step, and is measured with noise and stalls. The policy must find out which kind
    pays while it decodes.

    Returns:
        A row for each case and batch: `fixed / plain`, the best fixed budget's speed; then the
        share that each policy reaches. 1 is as fast as the best choice in hindsight.
    """
    rows = []
    for really, factors in _REALLY.items():
        for batch in _GATE_BATCHES:
            parts = [(corpus.interleaved() * max(1, batch // 8), factors)]
            rows.append(_row(really, corpus, source, policies, parts, batch, seeds))
    return rows


def change_study(
    corpus: Corpus,
    source: CostSource,
    policies: Mapping[str, Maker] = PRODUCT,
    seeds: Sequence[int] = (0,),
) -> list[dict[str, Any]]:
    """The same where costs change in the middle, or one domain follows the other.

    The best choice in hindsight is made for each half.
    """
    rows = []
    for name, halves in _CHANGES.items():
        for batch in _GATE_BATCHES:
            requests = corpus.interleaved()
            if name == "one domain after the other":
                requests = [one for domain in corpus.domains for one in corpus.of_domain(domain)]
            requests *= max(2, batch // 4)  # each half as long as a replay of the other study
            middle = len(requests) // 2
            both = (requests[:middle], requests[middle:])
            parts = list(zip(both, halves, strict=True))
            rows.append(_row(name, corpus, source, policies, parts, batch, seeds))
    return rows


def _row(
    really: str,
    corpus: Corpus,
    source: CostSource,
    policies: Mapping[str, Maker],
    parts: list[tuple[list[Request], tuple[float, float]]],
    batch: int,
    seeds: Sequence[int],
) -> dict[str, Any]:
    """A row of a study whose requests are decoded in parts, each with its factors."""

    def milliseconds(policy: Policy, seed: int = 0) -> list[float]:
        found = []
        for number, (requests, (plain, tree)) in enumerate(parts):
            own = seed + 1000 * number
            truth = Truth(source.table, plain, tree, noise=_NOISE, stalls=_STALLS, seed=own)
            found.append(simulate(corpus, policy, truth, requests=requests, batch=batch).ms)
        return found

    plain = milliseconds(Plain())
    fixed = [milliseconds(Fixed(corpus, n)) for n in _GATE_BUDGETS]
    best = sum(map(min, plain, *fixed))
    row: dict[str, Any] = {"really": really, "batch": batch}
    row["fixed / plain"] = sum(plain) / min(map(sum, fixed))
    for name, make in policies.items():
        taken = [sum(milliseconds(make(corpus, source), seed)) for seed in seeds]
        row[name] = best * len(seeds) / sum(taken)
    return row
