# SPDX-License-Identifier: Apache-2.0
"""Every budget setting gives plain decoding's tokens, and the budget follows the costs."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean

import pytest

from tests.e2e import cases
from tests.e2e.compare import Comparison
from tests.e2e.costs import linear
from tests.e2e.engines import GAMMA, Batch, Engine
from tests.e2e.marks import slow

pytestmark = pytest.mark.e2e

_BUDGETS: list[tuple[str, Engine]] = [
    ("1 node", Engine(eager=True).with_bastion(1, 1)),
    ("8 nodes, fixed", Engine(eager=True).with_bastion(8, 8)),
    ("32 nodes, fixed", Engine(max_num_seqs=2, eager=True).with_bastion(32, 32)),
    ("63 nodes, fixed", Engine(max_num_seqs=1, eager=True).with_bastion(63, 63)),
    ("1 node, adaptive", Engine(eager=True).with_bastion(1)),
    ("none verified", Engine(eager=True).with_bastion(16, 0)),
    ("lagged", Engine(eager=True).with_bastion(16, budget_timing="lagged")),
    ("lagged, fixed", Engine(eager=True).with_bastion(16, 8, budget_timing="lagged")),
    ("lagged, top-1", Engine(eager=True).with_bastion(32, budget_timing="lagged", top_k=1)),
    # A roofline needs measured steps.
    ("ema_calib", Engine(eager=True).with_bastion(16, costs=None, latency_model="ema_calib")),
    ("top-1", Engine(eager=True).with_bastion(GAMMA, GAMMA, top_k=1)),
]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("label", "engine"), _BUDGETS, ids=[label for label, _ in _BUDGETS])
def test_all_budgets(compare: Comparison, label: str, engine: Engine) -> None:
    batches, plain = [cases.greedy(6), cases.sampled(9)], replace(engine, speculative={})
    _, tree = compare.both(label, batches, plain, engine)
    budget = engine.speculative["bastion_budget"]
    if budget != "adaptive" and engine.speculative.get("bastion_budget_timing") != "lagged":
        assert max(tree["batches"][0]["verified"], default=0) == budget
    compare.oracle(f"{label}, oracle", batches, plain, engine)


def test_lagged(compare: Comparison) -> None:
    """Lagged timing, as on a GPU: the previous scores size a step, and the device shares it out."""
    # Rows cost enough to make the shares unequal, but not so much that nothing is drafted.
    costs = linear(10.0, 0.4)
    batches = [cases.greedy(2, tokens=48), cases.sampled(3, tokens=48), cases.stops()]
    engine = Engine(eager=True).with_async()
    tree = engine.with_bastion(16, budget_timing="lagged", costs=costs)
    _, run = compare.both("lagged, batch 4, async", batches, engine, tree)
    for outcome in run["batches"]:
        # The counts are per request and step, not the even split that the host planned.
        assert outcome["reported"] == outcome["counted"]
        # The step in which a request's end becomes known is not counted.
        metrics, ends = outcome["metrics"], max(outcome["verified"]) * len(outcome["requests"])
        drafted = metrics["spec_decode_num_draft_tokens"]
        assert 0 <= sum(outcome["verified"]) - drafted <= ends
        assert metrics["spec_decode_num_accepted_tokens"] <= drafted
    shares = [set(nodes.values()) for out in run["batches"] for nodes in out["counted"]]
    assert sum(max(share) - min(share) > 1 for share in shares) > 10


@pytest.mark.slow
@pytest.mark.parametrize("timing", ["exact", "lagged"])
def test_requests_with_their_own_budgets(compare: Comparison, timing: str) -> None:
    """Plain decoding, small trees and full ones in the same steps."""
    costs = linear(10.0, 0.05)
    limits, bare = [0, 3, None, 0, 16], Batch("requests with their own budgets")
    mixed, most = Batch(bare.case), {}
    for at, (name, text) in enumerate(cases.some(4)):
        limit, params = limits[at % 5], {"max_tokens": 40, **cases.drawn(at, temperature=0.8)}
        bare.add(name, text, **params)
        own = {} if limit is None else {"extra_args": {"bastion_budget": limit}}
        mixed.add(name, text, **params, **own)
        most[name] = 16 if limit is None else limit
    engine = Engine(eager=True).with_async(timing == "lagged")
    expected = compare.run(engine, [bare])
    run = compare.run(engine.with_bastion(16, budget_timing=timing, costs=costs), [mixed])
    compare.same(f"own budgets, {timing}", [bare], expected, run)
    outcome = run["batches"][0]
    assert outcome["reported"] == outcome["counted"]
    seen = dict.fromkeys(most, 0)
    for step in outcome["counted"]:
        for name, nodes in step.items():
            seen[name] = max(seen[name], nodes)
    assert all(nodes <= most[name] for name, nodes in seen.items())
    assert all((nodes > 0) == (most[name] > 0) for name, nodes in seen.items()), seen


@pytest.mark.parametrize("mode", ["sync", slow("async")])
def test_no_request_wants_drafts(compare: Comparison, mode: str) -> None:
    """Steps are those of plain decoding."""
    bare, own = Batch("every budget is 0"), Batch("every budget is 0")
    for at, (name, text) in enumerate(cases.some(2)):
        params = {"max_tokens": 40, **cases.drawn(at)}
        bare.add(name, text, **params)
        own.add(name, text, **params, extra_args={"bastion_budget": 0})
    plain = Engine(eager=True).of(max_num_batched_tokens=512).with_async(mode == "async")
    expected, run = compare.run(plain, [bare]), compare.run(plain.with_bastion(16), [own])
    compare.same(f"no budget, {mode}", [bare], expected, run)
    assert not any(run["batches"][0]["verified"])
    assert run["batches"][0]["batch_sizes"] == expected["batches"][0]["batch_sizes"]


NODES = 24
COSTS = {
    # Rows cost nothing: the largest tree is the best one.
    "flat": linear(10.0, 0.0),
    # A row costs a tenth of a step: only likely nodes pay.
    "dear": linear(10.0, 1.0),
    # Each row costs a whole step and a draft costs ten: nothing pays.
    "hopeless": linear(0.001, 1.0, draft=10.0),
}


@pytest.mark.slow
def test_the_budget_follows_the_costs(compare: Comparison) -> None:
    case = "costs from flat to hopeless, T=0"
    batch = cases.texts(case, 1, max_tokens=64, ignore_eos=True)
    # Batch size 1: the paper's rule; no step is shared.
    plain = Engine(max_num_seqs=1, eager=True)
    runs = {}
    for name, costs in COSTS.items():
        # N-gram drafts alone have only as many nodes as the match has tokens.
        engine = plain.with_bastion(NODES, lookup=False, costs=costs)
        runs[name] = compare.submit(engine, [batch])
    expected = compare.run(plain, [batch])
    for name, run in runs.items():
        compare.same(f"{name} costs", [batch], expected, run.result())
    verified = {name: run.result()["batches"][0]["verified"] for name, run in runs.items()}
    assert set(verified["flat"]) == {NODES}
    assert 0 < mean(verified["dear"]) < GAMMA
    # A few trees are tried now and then; everything else is plain decoding.
    steps = runs["hopeless"].result()["batches"][0]["forwards"]
    assert len(verified["hopeless"]) < 0.5 * steps
    assert steps > 2 * runs["flat"].result()["batches"][0]["forwards"]
