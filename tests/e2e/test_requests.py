# SPDX-License-Identifier: Apache-2.0
"""Requests with further sampling parameters get trees, and plain decoding's tokens.

Penalties, bad words, minimum lengths, log-probabilities, grammars: alone, combined, and beside
requests without any. A request had a tree if more nodes were verified than a chain has.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.e2e import cases
from tests.e2e.compare import Comparison, leaving_the_chain
from tests.e2e.engines import GAMMA, Batch, Engine
from tests.e2e.marks import slow

pytestmark = pytest.mark.e2e

NODES = 24
KINDS: dict[str, dict[str, Any]] = {
    "free": {},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.6, "logprobs": 2},
    "repetition": {"repetition_penalty": 1.3},
    "rewards": {"repetition_penalty": 0.8, "frequency_penalty": -0.3},
    "bad-words": {"bad_words": ["the", "return", "=", " a", "in the"]},
    "min-tokens": {"min_tokens": 20, "stop": ["e"], "stop_token_ids": list(range(2, 30))},
    "logprobs": {"logprobs": 3, "prompt_logprobs": 2},
    "allowed": {"allowed_token_ids": list(range(2, 600)), "logprobs": 0},
    "bias": {"logit_bias": {str(token): 2.0 for token in range(60, 90)}},
    "min-p": {"min_p": 0.2, "logprobs": 1},
    "everything": {
        "repetition_penalty": 1.1, "presence_penalty": 0.5, "bad_words": ["return", "of the"],
        "min_tokens": 12, "logprobs": 1, "top_p": 0.9, "min_p": 0.05,
        "logit_bias": {"70": 1.5, "300": -4.0},
    },
}  # fmt: skip


def wishes(
    case: str, kinds: dict[str, dict[str, Any]], prompts: list[tuple[str, str]], tokens: int = 32
) -> Batch:
    """Every kind at T=0 and, seeded, at T=0.8, on alternating prompts."""
    batch = Batch(case)
    samplings = ({"temperature": 0}, {"temperature": 0.8, "seed": 11})
    for at, (kind, sampling) in enumerate(itertools.product(kinds, samplings)):
        name, text = prompts[at % len(prompts)]
        params = {"max_tokens": tokens, **sampling, **kinds[kind]}
        batch.add(f"{kind}-{at}-{name}", text, **params)
    return batch


def wide(outcome: dict[str, Any]) -> set[str]:
    """The requests that were verified with more nodes than a chain has."""
    rows = zip(outcome["path_requests"], outcome["verified"], strict=True)
    return {name for name, nodes in rows if nodes > GAMMA}


def assert_trees(outcome: dict[str, Any], requests: list[dict[str, Any]]) -> None:
    results = {request["id"]: outcome["requests"][request["id"]] for request in requests}
    asked = {name for name, result in results.items() if len(result["token_ids"]) > 2}
    assert asked <= wide(outcome)


def test_every_kind_in_one_batch(compare: Comparison) -> None:
    """Four at a time with an oracle as the drafter: long paths that leave the chain."""
    batch = wishes("requests of every kind", KINDS, cases.some(4, first=16))
    plain = Engine(eager=True)
    tree = plain.with_bastion(NODES, NODES)
    _, run = compare.oracle("24 nodes, oracle", [batch], plain, tree)
    outcome = run["batches"][0]
    assert_trees(outcome, batch.requests)
    rows = zip(outcome["path_requests"], outcome["paths"], strict=True)
    branchy = {name for name, path in rows if leaving_the_chain([path])}
    assert len(branchy) > len(KINDS)


GRAMMARS: dict[str, dict[str, Any]] = {
    "json": {"structured_outputs": {"json": cases.PERSON}},
    "regex": {"structured_outputs": {"regex": r"[a-z ]{20,40}(\.[0-9]{1,3};)?"}},
    "choice": {"structured_outputs": {"choice": ["one apple and a half", "two pears", "none"]}},
    "penalised": {"structured_outputs": {"regex": r"[a-z ]{8,30}"}, "presence_penalty": 0.8},
    "scored": {"structured_outputs": {"json": cases.PERSON}, "logprobs": 2},
    "free": {},
}


@pytest.mark.parametrize("mode", ["async", slow("sync")])
def test_grammars(compare: Comparison, mode: str) -> None:
    """Trees of 16 nodes with grammars beside one of 24 without, an oracle as the drafter."""
    batch = wishes("grammars", GRAMMARS, cases.some(4, first=20))
    plain = Engine(eager=True, async_scheduling=mode == "async")
    tree = plain.with_bastion(63, NODES)
    _, run = compare.oracle(f"grammars, {mode}", [batch], plain, tree)
    kinds = {name.split("-")[0] for name in wide(run["batches"][0])}
    assert kinds >= {"json", "regex", "penalised", "scored"}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seqs", [1, 4])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_every_kind_on_many_prompts(compare: Comparison, seqs: int, mode: str) -> None:
    """15 prompts of each kind at T=0 and 15 at T=0.8, with the real drafter and the oracle."""
    prompts = cases.some(10)
    merged = Batch("requests of every kind, 30 prompts each")
    for i in range(0, 30, 2):
        for request in wishes("", KINDS | GRAMMARS, prompts[i:] + prompts[:i], 48).requests:
            merged.requests.append({**request, "id": f"{i}-{request['id']}"})
    plain = Engine(max_num_seqs=seqs, eager=True, async_scheduling=mode == "async")
    tree = plain.with_bastion(63, NODES)
    _, run = compare.both(f"batch {seqs}, {mode}", [merged], plain, tree)
    free = [request for request in merged.requests if "structured" not in str(request["params"])]
    assert_trees(run["batches"][0], free)
    compare.oracle(f"batch {seqs}, {mode}, oracle", [merged], plain, tree)
