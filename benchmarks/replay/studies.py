# SPDX-License-Identifier: Apache-2.0
"""The studies of a recording: each a function from recording and costs to numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.replay.costs import CostSource
from benchmarks.replay.lookup import NODES, Engine
from benchmarks.replay.policies import Adaptive, Beam, Chain, Fixed, Plain
from benchmarks.replay.simulation import Corpus, Policy, Request, Result, Truth, simulate
from benchmarks.replay.steps import greedy_chain

BUDGETS = (8, 16, 32, 64, 128, 256, 512, 1024)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
# most nodes of a request in batches; larger graphs would never be captured
BATCH_NODES = 128

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

# Of lookup.
_LOOKUP_BATCHES, _LOOKUP_BUDGETS = (1, 4, 16), (16, 32, NODES)


def budget_study(corpus: Corpus, source: CostSource) -> dict[str, Any]:
    """Fixed budgets, their oracles, chain, beam and the adaptive policies, batch 1.

    Returns:
        `domains`; `rows`: name -> {domain or "average" -> {speedup, tau, nodes}}; `summary`.
        "average" is the mean of the domains' speed-ups, as in the paper's tables.
    """
    truth = Truth(source.table)
    plain = simulate(corpus, Plain(), truth)
    depth = corpus.recording.depth
    table = source.latency("table")
    fixed = {n: simulate(corpus, Fixed(corpus, n), truth) for n in BUDGETS if n <= corpus.max_nodes}
    # as many best-first nodes as the beam has: the paper compares 4 x 15 with N = 61, root included
    matched = 4 * depth
    others: list[Policy] = [
        Chain(corpus),
        Beam(corpus, 4),
        Fixed(corpus, matched),
        Adaptive(corpus, table, name="adaptive"),
        Adaptive(corpus, table, name="adaptive, lagged", lagged=True),
    ]
    results = [simulate(corpus, policy, truth) for policy in others]
    # a name of its own, because the number may also be a budget of the sweep
    results[2].name = f"best-first {matched}"
    rows = {r.name: by_domain(corpus, r, plain) for r in [plain, *fixed.values(), *results]}
    rows["oracle per domain"] = _oracle(corpus, fixed, plain, per_prompt=False)
    rows["oracle per prompt"] = _oracle(corpus, fixed, plain, per_prompt=True)
    rows = {name: _with_mean(own) for name, own in rows.items()}
    best = max((rows[r.name]["average"]["speedup"], n) for n, r in fixed.items())
    speed = {name: row["average"]["speedup"] for name, row in rows.items()}
    return {
        "domains": corpus.domains,
        "rows": rows,
        "summary": {
            "adaptive / oracle per domain": speed["adaptive"] / speed["oracle per domain"],
            "worst domain of it": min(
                rows["adaptive"][d]["speedup"] / rows["oracle per domain"][d]["speedup"]
                for d in corpus.domains
            ),
            "worst domain, plain decoding allowed to the oracle": min(
                rows["adaptive"][d]["speedup"] / max(1.0, rows["oracle per domain"][d]["speedup"])
                for d in corpus.domains
            ),
            "best fixed budget": best[1],
            "adaptive / best fixed": speed["adaptive"] / best[0],
            "best-first / beam, speed": speed[f"best-first {matched}"] / speed[f"beam 4x{depth}"],
        },
    }


def batch_study(corpus: Corpus, source: CostSource) -> list[dict[str, Any]]:
    """Shared against per-request budgets, the chain and the best fixed budget, batch 1 to 64.

    The recording's requests are repeated so that every batch is full most of the time.
    """
    rows = []
    truth = Truth(source.table)
    for batch in BATCHES:
        base = corpus.interleaved()
        requests = base * max(1, -(-4 * batch // len(base)))
        plain = simulate(corpus, Plain(), truth, requests=requests, batch=batch)
        fixed = {
            n: simulate(corpus, Fixed(corpus, n), truth, requests=requests, batch=batch)
            for n in BUDGETS
            if n <= BATCH_NODES
        }
        best = min(fixed, key=lambda n: fixed[n].ms)
        row: dict[str, Any] = {"batch": batch, "best fixed": plain.ms / fixed[best].ms, "N": best}
        chain = simulate(corpus, Chain(corpus), truth, requests=requests, batch=batch)
        row["chain"] = plain.ms / chain.ms
        for name, shared in (("shared", True), ("per request", False)):
            policy = Adaptive(corpus, source.latency("table"), max_nodes=BATCH_NODES, shared=shared)
            result = simulate(corpus, policy, truth, requests=requests, batch=batch)
            row[name] = plain.ms / result.ms
            row[f"nodes, {name}"] = result.mean_nodes
        rows.append(row)
    return rows


def score_study(corpus: Corpus, source: CostSource) -> dict[str, float]:
    """Correlation of A-hat with the accepted length.

    `chain` is the paper's: at every recorded position, the chain of best children. `tree` is the
    tree that the controller chose, at every step.
    """
    policy = Adaptive(corpus, source.latency("table"), plain=False)
    simulate(corpus, policy, Truth(source.table))
    predicted, accepted = np.array(policy.predictions).T
    steps = [
        step
        for request in corpus.requests
        for step in range(request.first_step, request.first_step + request.last)
    ]
    chains, logprobs = map(
        np.stack, zip(*(greedy_chain(corpus.scores(s)) for s in steps), strict=True)
    )
    chain = np.exp(np.cumsum(logprobs, axis=1)).sum(axis=1)
    truth = np.cumprod(corpus.ranks[steps] == chains, axis=1).sum(axis=1)
    return {**_correlations("chain", chain, truth), **_correlations("tree", predicted, accepted)}


def gate_study(corpus: Corpus, source: CostSource) -> list[dict[str, Any]]:
    """Never slower: the gate against the better of plain decoding and the best fixed budget.

    What steps really cost differs from the calibrated costs that the controller starts from, by a
    factor on each kind of step, and is measured with noise and stalls. The controller must find out
    which kind pays while it decodes.

    Returns:
        A row for each case and batch: `fixed / plain`, the best fixed budget's speed; then the
        shares that exact and lagged timing reach, and that of trees in every step. 1 is as fast as
        the best choice in hindsight.
    """

    def row(really: str, batch: int) -> dict[str, Any]:
        plain, tree = _REALLY[really]
        requests = corpus.interleaved() * max(1, batch // 8)

        def milliseconds(policy: Policy) -> float:
            truth = Truth(source.table, plain=plain, tree=tree, noise=_NOISE, stalls=_STALLS)
            return simulate(corpus, policy, truth, requests=requests, batch=batch).ms

        def share(**options: bool) -> float:
            latency = source.latency("ema_table")
            return best / milliseconds(Adaptive(corpus, latency, max_nodes=_GATE_NODES, **options))

        plain_ms = milliseconds(Plain())
        fixed_ms = min(milliseconds(Fixed(corpus, n)) for n in _GATE_BUDGETS)
        best = min(plain_ms, fixed_ms)
        return {
            "really": really,
            "batch": batch,
            "fixed / plain": plain_ms / fixed_ms,
            "exact": share(),
            "lagged": share(lagged=True),
            "always drafting": share(plain=False),
        }

    return [row(really, batch) for really in _REALLY for batch in _GATE_BATCHES]


def lookup_study(corpus: Corpus, source: CostSource) -> list[dict[str, Any]]:
    """Speed-up over plain decoding with and without copies, by batch and domain; and tau.

    The oracle takes the faster of all methods for each prompt, in hindsight.
    """
    truth = Truth(source.table)

    def engine(name: str, **options: Any) -> Engine:
        return Engine(corpus, source.latency("ema_table"), name=name, **options)

    def row(name: str, batch: int, results: dict[str, Result], requests: Sequence[Request]) -> Any:
        plain, *others = results.values()
        found: dict[str, Any] = {"batch": batch, "set": name}
        found |= {one.name: plain.ms / one.ms for one in others}
        if batch == 1:
            best = sum(min(r.parts[q.index].ms for r in results.values()) for q in requests)
            found["oracle"] = plain.ms / best
        taus = ("adaptive", "with copies")
        return found | {f"tau, {method}": results[method].tau for method in taus}

    rows = []
    for batch in _LOOKUP_BATCHES:
        policies = [
            Plain(),
            engine("adaptive", lookup=False),
            engine("with copies"),
            engine("copies alone", drafter=False),
            *(
                engine(f"N={n}{' with copies' * lookup}", lookup=lookup, budget=n)
                for n in _LOOKUP_BUDGETS
                for lookup in (False, True)
            ),
        ]
        whole = {one.name: simulate(corpus, one, truth, batch=batch) for one in policies}
        rows.append(row("all", batch, whole, corpus.requests))
        for domain in corpus.domains if batch == 1 else ():
            requests = corpus.of_domain(domain)
            parts = {name: result.of(requests) for name, result in whole.items()}
            rows.append(row(domain, batch, parts, requests))
    return rows


def by_domain(corpus: Corpus, result: Result, plain: Result) -> dict[str, dict[str, float]]:
    requests = {domain: corpus.of_domain(domain) for domain in corpus.domains}
    return {name: _numbers(result.of(own), plain.of(own)) for name, own in requests.items()}


def _numbers(part: Result, plain: Result) -> dict[str, float]:
    return {"speedup": plain.ms / part.ms, "tau": part.tau, "nodes": part.mean_nodes}


def _oracle(
    corpus: Corpus, fixed: dict[int, Result], plain: Result, *, per_prompt: bool
) -> dict[str, dict[str, float]]:
    """The best fixed budget in hindsight, of every domain or of every prompt."""
    rows = {}
    for domain in corpus.domains:
        requests = corpus.of_domain(domain)
        best = Result("oracle")
        for group in [[request] for request in requests] if per_prompt else [requests]:
            part = min((result.of(group) for result in fixed.values()), key=lambda part: part.ms)
            best.add(part.ms, part.tokens, part.nodes, part.steps, part.request_steps)
        rows[domain] = _numbers(best, plain.of(requests))
    return rows


def _with_mean(rows: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    numbers = list(rows.values())
    keys = ("speedup", "tau", "nodes")
    mean = {key: float(np.mean([row[key] for row in numbers])) for key in keys}
    return {**rows, "average": mean}


def _correlations(
    name: str, predicted: Sequence[float] | np.ndarray, truth: Sequence[float] | np.ndarray
) -> dict[str, float]:
    from scipy.stats import pearsonr, spearmanr

    return {
        f"{name} pearson": float(pearsonr(predicted, truth).statistic),
        f"{name} spearman": float(spearmanr(predicted, truth).statistic),
        f"{name} predicted": float(np.mean(predicted)),
        f"{name} accepted": float(np.mean(truth)),
    }
