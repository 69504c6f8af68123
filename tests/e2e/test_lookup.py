# SPDX-License-Identifier: Apache-2.0
"""Lookup: texts that repeat give plain decoding's tokens, with copies in trees and copies alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.random_drafter import write_random
from tests.e2e import cases
from tests.e2e.compare import Comparison
from tests.e2e.costs import linear
from tests.e2e.engines import DRAFTER, Batch, Engine
from tests.e2e.marks import slow

pytestmark = pytest.mark.e2e
PLAIN = Engine(eager=True)


def repeating() -> Batch:
    """Prompts that repeat themselves, an edited copy among them; greedy and seeded."""
    batch = Batch("prompts that repeat")
    text = cases.long_prompt("code", 40)
    edited = [*text[:12], text[3], *text[13:30], text[5], *text[31:]]
    for i, prompt in enumerate((2 * text, [*text, *edited, *text[:20]], 3 * text[:20])):
        batch.add(f"repeats-{i}", prompt, arrive=2 * i, temperature=0.7 * (i == 1), seed=i,
                  max_tokens=64, ignore_eos=True)  # fmt: skip
    return batch


def steps_because(run: dict[str, Any], reason: str) -> float:
    metrics = run["batches"][0]["metrics"]
    return sum(n for name, n in metrics.items() if "bastion_steps" in name and reason in name)


def by_source(run: dict[str, Any], what: str) -> dict[str, float]:
    metrics = run["batches"][0]["metrics"]
    sources = ("drafter", "lookup", "both")
    return {name: metrics.get(f"bastion_{what}_by_source/{name}", 0) for name in sources}


@pytest.mark.parametrize("mode", ["lagged", slow("sync"), slow("async")])
def test_copies_alone_where_a_draft_is_dear(compare: Comparison, mode: str) -> None:
    keys = costs(drafter_ms=1000.0)
    if mode == "lagged":
        keys["budget_timing"] = "lagged"
    tree = PLAIN.with_bastion(32, lookup=True, **keys)
    tree = tree.with_async(mode != "sync")
    expected, done = compare.both(f"copies alone, {mode}", [repeating()], PLAIN, tree)
    assert steps_because(done, "copies alone") > 0
    accepted = by_source(done, "accepted")
    assert accepted["lookup"] > 0 and not accepted["both"]
    assert done["batches"][0]["forwards"] < expected["batches"][0]["forwards"]


def half_repeating() -> Batch:
    """Replies of which some parts stand in their context, and others do not."""
    batch = Batch("texts that repeat in part")
    for i in range(6):
        prompt = cases.long_prompt(cases.DOMAINS[i % 3], 60 + 8 * i)
        batch.add(f"partly-{i}", prompt, max_tokens=96, ignore_eos=True)
    return batch


def test_a_drafter_that_is_never_right_gets_no_credit_for_copies(
    compare: Comparison, tmp_path: Path
) -> None:
    """Its trees hold copies too, which are right: what they bring is not the drafter's."""
    drafter = write_random(Path(DRAFTER), tmp_path / "random")
    keys = costs(drafter_ms=1.0)
    tree = PLAIN.with_bastion(32, lookup=True, model=str(drafter), **keys)
    _, done = compare.both("copies beside wrong drafts", [half_repeating()], PLAIN, tree)
    assert steps_because(done, "pays") < 0.3 * steps_because(done, "copies alone")


def test_a_fixed_budget_with_and_without_lookup(compare: Comparison, tmp_path: Path) -> None:
    batches = [repeating()]
    trees = [PLAIN.with_bastion(16, 16, lookup=lookup) for lookup in (True, False)]
    expected, mixed, without = compare.all([PLAIN, *trees], batches)
    compare.same("lookup in trees", batches, expected, mixed)
    compare.same("without lookup", batches, expected, without)
    nodes, accepted = by_source(mixed, "nodes"), by_source(mixed, "accepted")
    assert min(nodes.values()) > 0 and accepted["lookup"] + accepted["both"] > 0
    metrics = mixed["batches"][0]["metrics"]
    assert sum(nodes.values()) <= metrics["spec_decode_num_draft_tokens"]
    assert sum(accepted.values()) == metrics["spec_decode_num_accepted_tokens"]
    assert not any(by_source(without, "nodes").values())
    assert mixed["batches"][0]["forwards"] <= without["batches"][0]["forwards"]
