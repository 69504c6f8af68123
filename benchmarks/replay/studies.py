# SPDX-License-Identifier: Apache-2.0
"""Never slower: policies against the best choice in hindsight, where costs are not as believed.

What steps really cost differs from the costs that a policy starts from, by a factor on each kind of
step, and is measured with noise and stalls. The policy must find out which kind pays while it
decodes. The choice in hindsight is the best of plain decoding and fixed budgets; where costs change
in the middle, or one domain follows the other, it is made for each half.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.replay.costs import Costs
from benchmarks.replay.policies import Fixed, Gated, Plain
from benchmarks.replay.simulation import Corpus, Policy, Request, Truth, simulate

# A policy for a corpus and costs, made anew for each replay because it learns.
Maker = Callable[[Corpus, Costs], Policy]
# Requests, and the factors on plain steps and on steps with trees while they are decoded.
Part = tuple[list[Request], tuple[float, float]]

_OFF = {
    "as measured": (1.0, 1.0),
    "plain steps 0.6": (0.6, 1.0),
    "trees 2.0": (1.0, 2.0),
    "trees 3.0": (1.0, 3.0),
    "plain steps 1.5": (1.5, 1.0),
}
# In the first half of a replay, and in the second half.
_CHANGES = {
    "trees 3.0, then 1.0": ((1.0, 3.0), (1.0, 1.0)),
    "trees 1.0, then 3.0": ((1.0, 1.0), (1.0, 3.0)),
    "plain steps 0.6, then 1.5": ((0.6, 1.0), (1.5, 1.0)),
    "one domain after the other": ((1.0, 1.0), (1.0, 1.0)),
}
_BATCHES, _BUDGETS, _MOST_NODES = (1, 4, 16), (4, 8, 16, 32, 64), 64
_NOISE, _STALLS = 0.15, 0.01

# What the product does: exact where the host can wait for a step's scores, lagged on a GPU.
PRODUCT: dict[str, Maker] = {
    "exact": partial(Gated, max_nodes=_MOST_NODES),
    "lagged": partial(Gated, max_nodes=_MOST_NODES, lagged=True),
}


def costs_off(corpus: Corpus, batch: int) -> dict[str, list[Part]]:
    requests = corpus.interleaved() * max(1, batch // 8)
    return {name: [(requests, factors)] for name, factors in _OFF.items()}


def costs_change(corpus: Corpus, batch: int) -> dict[str, list[Part]]:
    found = {}
    for name, halves in _CHANGES.items():
        requests = corpus.interleaved()
        if name == "one domain after the other":
            requests = [one for own in corpus.domains.values() for one in own]
        requests *= max(2, batch // 4)  # each half as long as a replay of the other study
        middle = len(requests) // 2
        found[name] = list(zip((requests[:middle], requests[middle:]), halves, strict=True))
    return found


STUDIES = {"costs off": costs_off, "costs change": costs_change}


def shares_of_best(
    name: str,
    corpus: Corpus,
    costs: Costs,
    policies: Mapping[str, Maker] = PRODUCT,
    seeds: Sequence[int] = (0,),
) -> list[dict[str, Any]]:
    """A row for each case of a study and batch.

    `fixed / plain` is the best fixed budget's speed; then comes the share of the best choice's
    speed that each policy reaches.
    """
    rows = []
    for batch in _BATCHES:
        for case, parts in STUDIES[name](corpus, batch).items():
            ms = partial(_milliseconds, corpus, costs, parts, batch)
            plain, *fixed = ms(Plain()), *(ms(Fixed(corpus, n)) for n in _BUDGETS)
            best = sum(map(min, plain, *fixed))
            row: dict[str, Any] = {"really": case, "batch": batch}
            row["fixed / plain"] = sum(plain) / min(map(sum, fixed))
            for policy, make in policies.items():
                taken = sum(sum(ms(make(corpus, costs), seed)) for seed in seeds)
                row[policy] = best * len(seeds) / taken
            rows.append(row)
    return rows


def _milliseconds(
    corpus: Corpus, costs: Costs, parts: list[Part], batch: int, policy: Policy, seed: int = 0
) -> list[float]:
    """Of each part under one policy, which learns in all of them."""
    found = []
    for number, (requests, (plain, tree)) in enumerate(parts):
        truth = Truth(costs, plain, tree, _NOISE, _STALLS, seed + 1000 * number)
        found.append(simulate(corpus, policy, truth, requests=requests, batch=batch).ms)
    return found
