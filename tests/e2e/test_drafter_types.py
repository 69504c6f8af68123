# SPDX-License-Identifier: Apache-2.0
"""Drafters other than plain DFlash: their tokens, and width-1 trees against vLLM's own chain."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e import cases
from tests.e2e.compare import Comparison, leaving_the_chain
from tests.e2e.costs import linear
from tests.e2e.drafters import CAUSAL, HEADS, MARKOV, MUSE, REDUCED, make_drafter
from tests.e2e.engines import DRAFTER, GAMMA, ROOT, Batch, Engine, Runner
from tests.e2e.marks import slow

pytestmark = pytest.mark.e2e
PLAIN = Engine(max_num_seqs=3, eager=True)
PROBE = "tests.e2e.drafters:drafted"
# vLLM accepts two spellings of "causal", and the chains show that both took effect.
ALL = [*HEADS, *MARKOV, MUSE, *CAUSAL, *REDUCED]
# A head over candidates, and one that knows the token above.
QUICK = ("dflash2", MARKOV[0])


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drafters")


def together() -> Batch:
    """Greedy and seeded requests that decode side by side."""
    batch = Batch("other kinds of drafters")
    for i, domain in enumerate(cases.DOMAINS):
        temperature = 0.8 if i == 1 else 0
        batch.add(domain, cases.long_prompt(domain, 40), arrive=i, temperature=temperature,
                  seed=i, max_tokens=48, ignore_eos=True)  # fmt: skip
    return batch


def greedy() -> Batch:
    batch = Batch("other kinds of drafters, greedy")
    for domain in ("code", "arithmetic"):
        prompt = cases.long_prompt(domain, 24)
        batch.add(domain, prompt, temperature=0, max_tokens=40, ignore_eos=True)
    return batch


@pytest.mark.parametrize("kind", [kind if kind in QUICK else slow(kind) for kind in ALL])
def test_tokens_equal_plain_decoding(kind: str, compare: Comparison, folder: Path) -> None:
    drafter, batches = make_drafter(kind, folder / kind), [together()]
    tree = PLAIN.with_bastion(24, 24, model=drafter)
    _, run = compare.both(kind, batches, PLAIN, tree)
    paths = run["batches"][0]["paths"]
    assert leaving_the_chain(paths)
    # The tiny backbone was not trained to predict from the anchor.
    assert kind in MARKOV[1:] or max(map(len, paths)) > 2, "accepted beyond the first node"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALL)
def test_tokens_with_lagged_timing(kind: str, compare: Comparison, folder: Path) -> None:
    drafter, batches = make_drafter(kind, folder / f"{kind}-lagged"), [together()]
    tree = PLAIN.with_bastion(24, costs=linear(10.0, 0.4), model=drafter, budget_timing="lagged")
    compare.both(f"{kind}, lagged", batches, PLAIN, tree.with_async())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dflash", *ALL])
def test_a_width_1_tree_is_vllms_own_chain(kind: str, runner: Runner, folder: Path) -> None:
    """In drafts, steps, tokens of each step and vLLM's counters."""
    drafter = DRAFTER if kind == "dflash" else make_drafter(kind, folder / f"{kind}-chain")
    method = "dspark" if "dspark" in kind else "dflash"
    chain = PLAIN.with_method(method, GAMMA, model=drafter)
    ours = PLAIN.with_bastion(GAMMA, GAMMA, model=drafter, top_k=1)
    runs = [runner.submit(engine, [greedy()], probe=PROBE) for engine in (chain, ours)]
    theirs, mine = (run.result()["batches"][0] for run in runs)
    assert mine["probed"] == theirs["probed"]
    assert mine["forwards"] == theirs["forwards"] and mine["requests"] == theirs["requests"]
    if kind == "dflash":  # others may end in a step whose drafts no request can use: we have none
        counted = {name: n for name, n in theirs["metrics"].items() if "spec_decode" in name}
        assert counted and {**mine["metrics"], **counted} == mine["metrics"]
    drafts = [tuple(draft) for draft in mine["probed"]]
    assert len(set(drafts)) > 10 and all(len(draft) == GAMMA for draft in drafts)


@pytest.mark.slow
def test_a_trained_head_gains_more_with_a_tree_than_with_a_chain(compare: Comparison) -> None:
    drafter, batches = str(ROOT / "benchmarks" / "tiny" / "dflash2"), [greedy()]
    chain = PLAIN.with_method("dflash", GAMMA, model=drafter)
    tree = PLAIN.with_bastion(63, 63, model=drafter)
    # vLLM's chain verifies greedily, so its tokens are plain decoding's.
    theirs, mine = compare.all([chain, tree], batches)
    compare.same("trained DFlash2", batches, theirs, mine)
    assert mine["batches"][0]["forwards"] < theirs["batches"][0]["forwards"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*HEADS, *MARKOV[:1], REDUCED[0]])
def test_a_head_in_a_compiled_engine(kind: str, compare: Comparison, folder: Path) -> None:
    drafter, batches = make_drafter(kind, folder / f"{kind}-compiled"), [together()]
    engine = replace(PLAIN, eager=False)
    tree = engine.with_bastion(24, 24, model=drafter)
    compare.both(f"{kind}, compiled", batches, engine, tree)
