# SPDX-License-Identifier: Apache-2.0
"""Requests with further sampling parameters get trees, and plain decoding's tokens.

Penalties, bad words, minimum lengths, log-probabilities, grammars: alone, combined, and beside
requests without any. A request had a tree if more nodes were verified than a chain has.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e import cases
from tests.e2e.compare import Comparison
from tests.e2e.engines import GAMMA, Batch, Engine, Runner
from tests.e2e.test_lossless import answers

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
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "bad_words": ["return", "of the"],
        "min_tokens": 12,
        "logprobs": 1,
        "top_p": 0.9,
        "min_p": 0.05,
        "logit_bias": {"70": 1.5, "300": -4.0},
    },
}


def wishes(
    case: str, kinds: dict[str, dict[str, Any]], prompts: list[tuple[str, str]], tokens: int = 32
) -> Batch:
    """Every kind at T=0 and, seeded, at T=0.8, on alternating prompts."""
    batch = Batch(case)
    at = 0
    for kind, wanted in kinds.items():
        for sampling in ({"temperature": 0}, {"temperature": 0.8, "seed": 11}):
            name, text = prompts[at % len(prompts)]
            params = {"max_tokens": tokens, **sampling, **wanted}
            batch.add(f"{kind}-{at}-{name}", text, **params)
            at += 1
    return batch


def assert_trees(run: dict[str, Any], batch: Batch) -> None:
    """Every request of the batch was verified with more nodes than a chain has, path for path."""
    nodes: dict[str, int] = {}
    for name, verified in zip(run["path_requests"], run["verified"], strict=True):
        nodes[name] = max(nodes.get(name, 0), verified)
    for request in batch.requests:
        if len(run["requests"][request["id"]]["token_ids"]) > 2:
            assert nodes[request["id"]] > GAMMA, request["id"]


def test_every_kind_in_one_batch(runner: Runner, compare: Comparison) -> None:
    """Four at a time with an oracle as the drafter: long paths that leave the chain."""
    batch = wishes("requests of every kind", KINDS, cases.some(4, first=16))
    plain = Engine(eager=True)
    expected = runner.run(plain, [batch])
    known = {"answers": answers(expected)}
    run = runner.run(plain.with_bastion(NODES, NODES), [batch], oracle=known)
    compare.same("24 nodes, oracle", [batch], expected, run)
    assert_trees(run["batches"][0], batch)
    branchy = {
        name
        for name, path in zip(
            run["batches"][0]["path_requests"], run["batches"][0]["paths"], strict=True
        )
        if path != list(range(len(path)))
    }
    assert len(branchy) > len(KINDS)


GRAMMARS: dict[str, dict[str, Any]] = {
    "json": {"structured_outputs": {"json": cases.PERSON}},
    "regex": {"structured_outputs": {"regex": r"[a-z ]{20,40}(\.[0-9]{1,3};)?"}},
    "choice": {"structured_outputs": {"choice": ["one apple and a half", "two pears", "none"]}},
    "penalised": {"structured_outputs": {"regex": r"[a-z ]{8,30}"}, "presence_penalty": 0.8},
    "scored": {"structured_outputs": {"json": cases.PERSON}, "logprobs": 2},
    "free": {},
}


@pytest.mark.parametrize("mode", ["async", pytest.param("sync", marks=pytest.mark.slow)])
def test_grammars(runner: Runner, compare: Comparison, mode: str) -> None:
    """Trees with grammars beside one without: 24 of 63 nodes, an oracle as the drafter."""
    batch = wishes("grammars", GRAMMARS, cases.some(4, first=20))
    plain = Engine(eager=True, async_scheduling=mode == "async")
    expected = runner.run(plain, [batch])
    known = {"answers": answers(expected)}
    run = runner.run(plain.with_bastion(63, NODES), [batch], oracle=known)
    compare.same(f"grammars, {mode}", [batch], expected, run)
    outcome = run["batches"][0]
    wide = {
        name
        for name, nodes in zip(outcome["path_requests"], outcome["verified"], strict=True)
        if nodes > GAMMA
    }
    assert {name.split("-")[0] for name in wide} >= {"json", "regex", "penalised", "scored"}


_MODES = [(seqs, mode) for seqs in (1, 4) for mode in ("sync", "async")]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("seqs", "mode"), _MODES)
def test_every_kind_on_many_prompts(
    runner: Runner, compare: Comparison, seqs: int, mode: str
) -> None:
    """15 prompts of each kind at T=0 and 15 at T=0.8, with the real drafter and the oracle."""
    prompts = cases.some(10)
    merged = Batch("requests of every kind, 30 prompts each")
    for i in range(0, 30, 2):
        for request in wishes("", KINDS | GRAMMARS, prompts[i:] + prompts[:i], 48).requests:
            merged.requests.append({**request, "id": f"{i}-{request['id']}"})
    plain = Engine(max_num_seqs=seqs, eager=True, async_scheduling=mode == "async")
    tree = plain.with_bastion(63, NODES)
    expected, run = runner.all([plain, tree], [merged])
    compare.same(f"batch {seqs}, {mode}", [merged], expected, run)
    free = [request for request in merged.requests if "structured" not in str(request["params"])]
    assert_trees(run["batches"][0], Batch("without a grammar", free))
    oracle = runner.run(tree, [merged], oracle={"answers": answers(expected)})
    compare.same(f"batch {seqs}, {mode}, oracle", [merged], expected, oracle)
