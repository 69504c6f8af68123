# SPDX-License-Identifier: Apache-2.0
"""N-gram drafts: texts that repeat give plain decoding's tokens, in trees and alone."""

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


def steps_of(run: dict[str, Any], kind: str) -> float:
    metrics = run["batches"][0]["metrics"]
    return sum(n for name, n in metrics.items() if name.startswith(f"bastion_steps/{kind}/"))


def by_source(run: dict[str, Any], what: str) -> dict[str, float]:
    metrics = run["batches"][0]["metrics"]
    sources = ("drafter", "lookup", "both")
    return {name: metrics.get(f"bastion_{what}_by_source/{name}", 0) for name in sources}


@pytest.mark.parametrize("mode", ["lagged", slow("sync"), slow("async")])
def test_n_gram_drafts_alone_where_a_draft_is_dear(compare: Comparison, mode: str) -> None:
    timing = "lagged" if mode == "lagged" else "auto"
    tree = PLAIN.with_bastion(32, costs=linear(10.0, 0.3, draft=1000.0), budget_timing=timing)
    tree = tree.with_async(mode != "sync")
    expected, done = compare.both(f"n-gram drafts alone, {mode}", [repeating()], PLAIN, tree)
    assert steps_of(done, "n-gram") > steps_of(done, "tree") > 0
    assert by_source(done, "accepted")["lookup"] > 0
    assert done["batches"][0]["forwards"] < expected["batches"][0]["forwards"]


@pytest.mark.parametrize("mode", ["sync", slow("async")])
def test_a_drafter_that_is_never_right(compare: Comparison, tmp_path: Path, mode: str) -> None:
    """Its trees hold n-gram drafts too, which are right where the text repeats."""
    drafter = write_random(Path(DRAFTER), tmp_path / "random")
    tree = PLAIN.with_bastion(32, costs=linear(10.0, 0.3, draft=5.0), model=str(drafter))
    tree, case = tree.with_async(mode == "async"), f"n-gram drafts beside wrong ones, {mode}"
    _, done = compare.both(case, [repeating()], PLAIN, tree)
    assert 0 < steps_of(done, "tree") < 0.3 * (steps_of(done, "n-gram") + steps_of(done, "plain"))


def test_a_fixed_budget_with_and_without_lookup(compare: Comparison) -> None:
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


def reset_after_three(session: Any) -> list[Any]:
    """Probe: reset the prefix cache once the third batch is done."""
    if not session.engine.has_unfinished_requests():
        session.drain()
        session.done = getattr(session, "done", 0) + 1
        assert session.done != 3 or session.llm.reset_prefix_cache()
    return []


@pytest.mark.parametrize("mode", ["sync", slow("async")])
def test_replies_to_other_requests_of_one_tenant(compare: Comparison, mode: str) -> None:
    prompt = cases.long_prompt("chat", 50)
    salts = ("one", "two", "one", "one")
    batches = [Batch(f"the same prompt, of {salt}") for salt in salts]
    for i, batch in enumerate(batches):
        batch.add(f"kept-{i}", prompt, temperature=0, max_tokens=96, ignore_eos=True,
                  cache_salt=salts[i])  # fmt: skip
    tree = PLAIN.with_bastion(16, 16, ngram_cache=4096).with_async(mode == "async")
    probe = "tests.e2e.test_lookup:reset_after_three"
    _, done = compare.both(f"kept replies, {mode}", batches, PLAIN, tree, probe=probe)
    first, stranger, again, reset = (batch["forwards"] for batch in done["batches"])
    assert again < 0.7 * stranger and first == pytest.approx(stranger, rel=0.2)
    assert reset == pytest.approx(stranger, rel=0.2)
