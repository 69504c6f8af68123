# SPDX-License-Identifier: Apache-2.0
"""Many requests in a step: unused placeholders delay nobody, and every request gets its turn."""

from __future__ import annotations

import pytest

from tests.e2e import cases
from tests.e2e.compare import Comparison
from tests.e2e.costs import linear
from tests.e2e.engines import GAMMA, Batch, Engine
from tests.e2e.marks import slow

pytestmark = pytest.mark.e2e

REQUESTS, TOKEN_LIMIT, NODES = 12, 128, 63
# Each row costs a whole step and a draft costs ten: nothing pays.
HOPELESS = linear(0.001, 1.0, draft=10.0)
# Rows cost next to nothing: the largest trees pay.
FLAT = linear(10.0, 0.001)


def crowd(tokens: int) -> Batch:
    case = f"{REQUESTS} requests at once"
    return cases.texts(case, REQUESTS // 3, prefix="load-", max_tokens=tokens, ignore_eos=True)


@pytest.mark.parametrize(
    ("pays", "mode"),
    [
        ("never", "sync"),
        slow("measured", "async"),
        slow("never", "async"),
        slow("measured", "sync"),
    ],
)
def test_large_batches_where_drafts_hardly_pay_take_as_many_steps_as_plain_decoding(
    compare: Comparison, pays: str, mode: str
) -> None:
    engine = Engine(max_num_seqs=REQUESTS, eager=True).with_async(mode == "async")
    asked = engine.with_bastion(NODES, costs=HOPELESS if pays == "never" else None)
    plain, tree = compare.both(f"{pays}, {mode}", [crowd(30)], engine, asked)
    left, right = plain["batches"][0], tree["batches"][0]
    print(f"{pays}, {mode}: {right['forwards']} forwards, plain {left['forwards']}")
    assert max(left["batch_sizes"]) == REQUESTS
    assert max(right["batch_sizes"]) >= REQUESTS - 2, "some are through before others begin"
    assert right["forwards"] <= left["forwards"]


# Eager: no other test has this limit of requests, so compiling would cost a third compilation.
@pytest.mark.parametrize("eager", [True, slow(False)], ids=["eager", "compiled"])
def test_the_drafter_may_need_more_rows_than_a_step_has(compare: Comparison, eager: bool) -> None:
    """The drafter's R x (1 + gamma) rows are more than the token limit, and drafting pays."""
    engine = Engine(max_num_seqs=REQUESTS, eager=eager)
    # Every step drafts: none has n-gram drafts alone.
    flat = engine.with_bastion(NODES, lookup=False, costs=FLAT)
    plain, tree = compare.both("costs of flat", [crowd(48)], engine.with_eager(), flat)
    left, right = plain["batches"][0], tree["batches"][0]
    print(f"flat: {right['forwards']} forwards, plain {left['forwards']}")
    assert max(right["batch_sizes"]) * (1 + GAMMA) > TOKEN_LIMIT
    assert right["forwards"] < 0.7 * left["forwards"]


@pytest.mark.parametrize("arms", ["free", slow("in turns")])
def test_prompts_fill_the_steps(compare: Comparison, arms: str) -> None:
    """Long prompts come while others decode: no prompt waits longer for its turn."""
    batch = Batch("prompts that fill steps")
    for i in range(9):
        long = i % 3 > 0
        prompt = cases.long_prompt(cases.DOMAINS[i % 3], 200 + 7 * i if long else 20)
        batch.add(f"fills-{i}", prompt, arrive=4 * i, max_tokens=30, ignore_eos=True,
                  **cases.drawn(i))  # fmt: skip
    engine = Engine(eager=True).with_async()
    setup = [] if arms == "free" else ["tests.e2e.plain_steps:every_arm"]
    plain = compare.submit(engine, [batch])
    tree = compare.run(engine.with_bastion(16), [batch], setup=setup)
    compare.same(f"prompts fill steps, arms {arms}", [batch], plain.result(), tree)
    assert tree["batches"][0]["forwards"] < plain.result()["batches"][0]["forwards"]


@pytest.mark.parametrize("mode", ["async", slow("sync")])
def test_one_request_then_many_then_one(compare: Comparison, mode: str) -> None:
    """Short replies beside a long one, with this machine's times."""
    batch = Batch("one, many, one")
    for i, (name, text) in enumerate(cases.some(5)):
        tokens, arrive = (160, 0) if i == 0 else (14, 20 + i // 8)
        batch.add(f"many-{name}", text, arrive=arrive, max_tokens=tokens, ignore_eos=True,
                  **cases.drawn(i))  # fmt: skip
    engine = Engine(max_num_seqs=REQUESTS, eager=True).with_async(mode == "async")
    tree = engine.with_bastion(NODES, costs=None)
    _, run = compare.both(f"one, many, one, {mode}", [batch], engine, tree)
    assert sum(map(len, run["batches"][0]["paths"])) > 0


def test_several_samples_of_a_prompt(compare: Comparison) -> None:
    """`n` = 3 with a seed: every sample equals plain decoding's. vLLM refuses `n` > 1 at T=0."""
    batch = Batch("n = 3")
    for (name, text), temperature in zip(cases.some(1, first=4), (1.0, 0.8, 0.0), strict=True):
        batch.add(f"n-{name}", text, n=3, temperature=temperature, seed=11, max_tokens=24,
                  ignore_eos=True)  # fmt: skip
    plain = Engine(max_num_seqs=6, eager=True)
    first, second = compare.both("n = 3", [batch], plain, plain.with_bastion(NODES, 12))
    left, right = (run["batches"][0]["requests"] for run in (first, second))
    *sampled, greedy = (request["id"] for request in batch.requests)
    assert "greedy" in right[greedy]["error"]
    for name in sampled:
        samples = left[name]["samples"]
        assert sorted(samples) == ["1", "2"] and samples["1"] != samples["2"]
        assert right[name]["samples"] == samples, name
