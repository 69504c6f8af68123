# SPDX-License-Identifier: Apache-2.0
"""Streaming-input sessions give the tokens of ordinary requests over the same history.

Where `max_tokens` or a stop cuts an accepted path, the next chunk begins behind the cut.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import cases
from tests.e2e.engines import Engine, Runner
from tests.e2e.marks import on_cpu, slow
from tests.e2e.targets import hybrid_pair
from tests.e2e.test_connectors import connector, over

pytestmark = on_cpu("tokens are compared without near-ties")

# (tokens of a chunk, max_tokens of a turn, turns, further parameters)
SHAPES: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "long turns": (25, 20, 3, {}),
    "short turns": (25, 5, 8, {}),
    "odd turns": (25, 13, 4, {}),
    "one token each": (1, 2, 12, {}),
    "stops": (25, 30, 4, {"stop_token_ids": list(range(2, 40))}),
    "seeded": (25, 13, 4, {"temperature": 1.0, "seed": 7}),
    "several steps a chunk": (140, 9, 2, {}),
}


def session(
    name: str, domain: str, chunk: int, tokens: int, turns: int, ahead: bool, **params: Any
) -> dict[str, Any]:
    """A session whose chunks are one text of the domain."""
    text = cases.long_prompt(domain, chunk * turns)
    params = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True, **params}
    parts = [text[i * chunk : (i + 1) * chunk] for i in range(turns)]
    turned = [{"chunk": part, "params": params} for part in parts]
    return {"id": f"{name}, {domain}", "ahead": ahead, "turns": turned}


def sessions(ahead: bool, everything: bool) -> list[dict[str, Any]]:
    """A session of each shape, with one domain after the other or with each."""
    return [
        session(name, domain, *shape[:3], ahead, **shape[3])
        for i, (name, shape) in enumerate(SHAPES.items())
        for j, domain in enumerate(cases.DOMAINS)
        if everything or i % len(cases.DOMAINS) == j
    ]


def assert_same(expected: dict[str, Any], run: dict[str, Any]) -> None:
    """Every session and every continued request has the expected tokens."""
    assert run["async"] == expected["async"]
    for part in ("sessions", "continued"):
        wrong = [
            name
            for name, result in run[part].items()
            if result["error"] or result["token_ids"] != expected[part][name]["token_ids"]
        ]
        assert not wrong, (part, len(wrong), len(run[part]), wrong)


def ordinary(runner: Runner, plain: Engine, made: list[dict[str, Any]]) -> dict[str, Any]:
    """Plain requests over the sessions' histories, and others that go on from where these end."""
    more = cases.long_prompt("chat", 20)
    return runner.run(plain, [], sessions=made, ordinary=True, continued=more)


_EVERY = itertools.product(("sync", "async"), ("exact", "lagged"), (False, True))


@pytest.mark.parametrize(
    ("mode", "timing", "ahead", "everything"),
    [("async", "lagged", True, False), *(slow(*how, True) for how in _EVERY)],
)
def test_sessions_equal_ordinary_requests(
    runner: Runner, mode: str, timing: str, ahead: bool, everything: bool
) -> None:
    """Prompts that find the sessions' blocks in the prefix cache are continued rightly, too."""
    plain = Engine(eager=True, async_scheduling=mode == "async")
    expected = ordinary(runner, plain, sessions(False, everything))
    budget = 16 if timing == "exact" else "adaptive"
    tree = plain.with_bastion(16, budget, budget_timing=timing)
    made = sessions(ahead, everything)
    run = runner.run(tree, [], sessions=made, continued=expected["prompts"])
    assert_same(expected, run)


@pytest.mark.slow
def test_the_drafter_keeps_its_context(runner: Runner) -> None:
    """Trees of sessions are accepted as those of ordinary requests over the same history."""
    tree = Engine(eager=True, max_num_seqs=1).with_bastion(16, 16, lookup=False)
    made = [session(name, "code", 25, n, 6, False) for name, n in (("long", 20), ("odd", 13))]
    ordinary = runner.submit(tree, [], sessions=made, ordinary=True)
    run = runner.run(tree, [], sessions=made)
    metrics, other = (result["metrics"] for result in (ordinary.result(), run))
    drafts, accepted = (f"vllm:spec_decode_num_{what}" for what in ("drafts", "accepted_tokens"))
    assert (metrics[drafts], metrics[accepted]) == (other[drafts], other[accepted])
    assert metrics[accepted] > metrics[drafts]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_preempted_sessions(runner: Runner, mode: str) -> None:
    """They lose their blocks in a turn, start over, and end with the same tokens."""
    plain = Engine(eager=True, async_scheduling=mode == "async", num_blocks=11)
    made = [session("crowded", domain, 25, 80, 2, True) for domain in cases.DOMAINS[:2]]
    expected = runner.submit(plain, [], sessions=made, ordinary=True)
    # With lookup they end before the blocks do.
    run = runner.run(plain.with_bastion(16, 16, lookup=False), [], sessions=made)
    assert_same(expected.result(), run)
    assert run["metrics"]["vllm:num_preemptions"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_over_a_connector(runner: Runner, tmp_path: Path, mode: str) -> None:
    """Another engine continues sessions whose blocks a connector has saved."""
    plain = Engine(eager=True, async_scheduling=mode == "async")
    made = [session("saved", domain, 25, 13, 4, False) for domain in cases.DOMAINS]
    expected = ordinary(runner, plain, made)
    tree = over(plain.with_bastion(16, 16), connector(tmp_path / "blocks"))
    assert_same(expected, runner.run(tree, [], sessions=made))
    other = runner.run(tree, [], sessions=[], continued=expected["prompts"])
    assert_same(expected, other)
    assert other["metrics"]["vllm:external_prefix_cache_hits"] > 0


def test_a_target_with_recurrent_layers_takes_none(runner: Runner) -> None:
    """Its state may be past the cut. One sentence says so, and ordinary requests are served."""
    plain, drafter = hybrid_pair()
    made = [session("hybrid", "code", 25, 13, 2, False)]
    tree = plain.with_bastion(16, 16, **drafter)
    run = runner.run(tree, [], sessions=made, continued={"one": made[0]["turns"][0]["chunk"]})
    error = run["sessions"]["hybrid, code"]["error"]
    assert error.startswith("VLLMValidationError: Streaming-input sessions")
    assert len(run["continued"]["one"]["token_ids"]) == 16


@pytest.mark.parametrize(
    ("mode", "ahead"),
    [slow("sync", False), slow("sync", True), slow("async", False), slow("async", True)],
)
def test_a_session_that_outgrows_the_model_ends_alone(
    runner: Runner, mode: str, ahead: bool
) -> None:
    """It ends with a sentence; the sessions beside it and the engine go on.

    A last chunk leaves room for one token, which is decoded; a further chunk ends the session.
    """
    most = 128
    plain = Engine(eager=True, async_scheduling=mode == "async", max_model_len=most)
    shapes = (("grows", most // 4, 6), ("small", 9, 5), ("one", 3, 7))
    made = [session(name, "code", chunk, 6, turns, ahead) for name, chunk, turns in shapes]
    text = cases.long_prompt("code", most + 8)
    params = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
    parts = (text[:60], text[60:122], text[122:123])
    filled = [{"chunk": part, "params": params} for part in parts]
    full = {"id": "full", "ahead": False}
    asked = [*made, {**full, "turns": filled[:2]}]
    expected = runner.submit(plain, [], sessions=asked, ordinary=True)
    asked = [*made, {**full, "turns": filled}]
    run = runner.run(plain.with_bastion(16, 16), [], sessions=asked)
    whole = expected.result()["sessions"]["grows, code"]
    grown = run["sessions"]["grows, code"]
    assert "length" in whole["error"], "an ordinary request of that length is refused"
    reason, sentence = grown["reasons"].pop()
    assert reason == "error" and f"max_model_len {most}" in sentence
    assert f"a chunk of {most // 4} tokens after {3 * (most // 4 + 5)} " in sentence
    if not ahead:  # else vLLM joins what the client has not taken yet
        assert grown["reasons"] == whole["reasons"] == [["length", None]] * 3
    assert_same(expected.result(), run)
    assert len(expected.result()["sessions"]["full"]["token_ids"]) == 7
    reasons = [reason for reason, _ in run["sessions"]["full"]["reasons"]]
    assert reasons == ["length", "length", "error"]
