# SPDX-License-Identifier: Apache-2.0
"""Random requests of every kind, side by side, give plain decoding's answers."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from tests.e2e import cases
from tests.e2e.compare import Comparison
from tests.e2e.engines import Batch, Engine

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(3600)]

REQUESTS = 60
FILTERS: tuple[dict[str, Any], ...] = (
    {}, {"top_p": 0.9}, {"top_k": 20}, {"top_p": 0.95, "top_k": 40}, {"min_p": 0.05}, {"n": 2},
)  # fmt: skip
WISHES: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1.2}, {"presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"logit_bias": {"40": 3.0, "77": -5.0}}, {"allowed_token_ids": list(range(2, 700))},
    {"stop_token_ids": [40, 41, 42, 43]}, {"bad_words": ["the", "return"]},
    {"include_stop_str_in_output": True, "stop": ["e"]}, {"stop": ["\n\n"]}, {"stop": [".", "="]},
    {"skip_special_tokens": False}, {"min_tokens": 4, "stop": [" "]}, {"logprobs": 2},
    {"logprobs": 0, "prompt_logprobs": 1},
    # refused: filters and a length that make no sense
    {"top_p": 2.0}, {"max_tokens": -1}, {"min_p": 3.0},
)  # fmt: skip
GRAMMARS: tuple[dict[str, Any], ...] = (
    {"choice": ["one apple", "two pears", "none at all"]},
    {"regex": r"(ab|cd){2,12} [0-9]{2,6}"},
    {"json": cases.PERSON},
)


def text(rng: random.Random, last: str) -> str:
    """A part of a prompt, of several joined ones, or of the last one again for prefix hits.

    A fifth repeat a piece of themselves, perhaps changed.
    """
    every = [prompt for some in cases.prompts().values() for prompt in some]
    if rng.random() < 0.6:
        last = "".join(rng.choices(every, k=rng.choice((1, 1, 1, 2, 4))))
    made = last[: rng.randint(1, 500)]
    if rng.random() < 0.2:
        begin = rng.randrange(len(made))
        piece = made[begin : begin + rng.randint(20, 200)]
        made += "\n" + piece.replace(rng.choice(piece), rng.choice("aeiou "))
    return made


def random_requests(seed: int, count: int = REQUESTS) -> Batch:
    rng, batch, last = random.Random(seed), Batch("random requests"), "def "
    for i in range(count):
        last = text(rng, last)
        params: dict[str, Any] = {"temperature": 0, "max_tokens": rng.randint(1, 70)}
        params["ignore_eos"] = rng.random() < 0.7
        if rng.random() < 0.45:
            params |= {"temperature": rng.choice((0.5, 0.8, 1.0)), "seed": rng.randrange(1 << 30)}
            params |= rng.choice(FILTERS)
        if rng.random() < 0.4:
            params |= rng.choice(WISHES)
        if rng.random() < 0.15:
            params |= {"structured_outputs": rng.choice(GRAMMARS)}
        own = {"abort_after": rng.randint(1, 12)} if rng.random() < 0.1 else {}
        # Sometimes one alone, sometimes more than the engine has seats for.
        batch.add(f"random-{i}", last, arrive=8 * i - rng.randint(0, 40), **own, **params)
    return batch


SMALL = Engine(max_num_seqs=6, num_blocks=24, eager=True)
ENGINES: dict[str, Engine] = {
    "measured costs, async": replace(SMALL.with_async().with_bastion(31, costs=None)),
    "lagged, a small cache": SMALL.with_async().with_bastion(24, budget_timing="lagged"),
    "a fixed budget": replace(SMALL, num_blocks=96).with_bastion(16, 16),
}


@pytest.mark.parametrize("every_arm", [False, True])
@pytest.mark.parametrize("label", ENGINES)
def test_random_requests(compare: Comparison, label: str, every_arm: bool) -> None:
    seed = 2 * list(ENGINES).index(label) + every_arm
    tree, batches = ENGINES[label], [random_requests(seed)]
    plain = replace(tree, speculative={}, costs=None)
    setup = ["tests.e2e.plain_steps:every_arm"] if every_arm else []
    expected = compare.submit(plain, batches)
    run = compare.run(tree, batches, setup=setup)
    compare.same(f"{label}, every arm {every_arm}", batches, expected.result(), run, plain)
    assert sum(map(len, run["batches"][0]["paths"])) > 100
    found = [result["error"] for result in run["batches"][0]["requests"].values()]
    assert 0 < sum(error is not None for error in found) < REQUESTS // 4
