# SPDX-License-Identifier: Apache-2.0
"""The soak of a server: what it sends, and what it calls a mistake."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks import TINY
from tests.soak.client import Answer, Choice
from tests.soak.judge import Judge
from tests.soak.over_http import compare, passed, repeat_timeouts
from tests.soak.requests import CHAT, COMPLETIONS, Request, Requests
from vllm_bastion.cpu.noise import gumbel_noise

PROMPT = list(range(40, 60))


def drawn(count: int, seed: int = 3) -> list[Request]:
    supply = Requests("tiny", ["def add(a, b):", "12 + 7 = "], seed)
    return [supply.draw() for _ in range(count)]


def test_the_same_seed_draws_the_same_requests() -> None:
    assert drawn(300) == drawn(300)
    assert drawn(300) != drawn(300, seed=4)


def test_every_kind_of_request_is_drawn() -> None:
    requests = drawn(600)
    assert {request.kind for request in requests} == {"right", "wrong", "ours"}
    assert {request.path for request in requests} == {COMPLETIONS, CHAT}
    json.dumps([request.body for request in requests])
    right = [request for request in requests if request.kind == "right"]
    assert {bool(request.given.get("stream")) for request in right} == {True, False}
    keys = {key for request in right for key in request.given}
    assert {"seed", "top_p", "min_p", "n", "stop", "structured_outputs", "tools"} <= keys
    unseeded = [r for r in right if r.given["temperature"] > 0 and "seed" not in r.given]
    assert unseeded and not any(request.repeatable for request in unseeded)
    assert not any(request.repeatable for request in right if request.cut is not None)


@pytest.fixture(scope="module")
def best() -> tuple[list[int], float]:
    """The target's best two tokens after `PROMPT`, and the difference of their logits."""
    model = AutoModelForCausalLM.from_pretrained(TINY / "target", dtype=torch.float32)
    with torch.inference_mode():
        top = model(torch.tensor([PROMPT])).logits[0, -1].topk(2)
    return top.indices.tolist(), float(top.values[0] - top.values[1])


def answered(*tokens: int) -> Answer:
    return Answer(200, {0: Choice(list(tokens), "a", "length")}, {0: PROMPT})


@pytest.mark.parametrize("tie", [False, True])
def test_a_near_tie_is_told_from_a_mistake(best: tuple[list[int], float], tie: bool) -> None:
    (first, second), gap = best
    judge = Judge(TINY / "target", gap * (1.1 if tie else 0.9))
    request = Request(1, COMPLETIONS, {"prompt": PROMPT, "temperature": 0})
    seen, expected = [(request, answered(second))], {1: answered(first)}
    problems, near_ties, counts = compare(seen, expected, judge, logprob=1e-3)
    assert (len(problems), len(near_ties)) == ((0, 1) if tie else (1, 0))
    assert counts["compared_tokens"] == 1


@pytest.mark.parametrize("edge", [True, False])
def test_a_token_at_the_edge_of_the_nucleus_may_be_left_out(edge: bool) -> None:
    model = AutoModelForCausalLM.from_pretrained(TINY / "target", dtype=torch.float32)
    with torch.inference_mode():
        probs, order = model(torch.tensor([PROMPT])).logits[0, -1].softmax(0).sort(descending=True)
    # At the edge the sixth token is in the nucleus by a hair; else no other token is near leaving.
    before = float(probs[:5].sum())
    top_p = before + (1e-5 if edge else 0.5 * float(probs[5]))
    noise = gumbel_noise(torch.arange(500), torch.full((500,), len(PROMPT) - 1), len(probs))
    scores = (probs.log() + noise[:, order])[:, :6]
    seed = int((scores.argmax(1) == 5).nonzero()[0])
    last, second = int(order[5]), int(order[scores[seed, :5].argmax()])
    given = {"temperature": 1.0, "top_p": top_p, "seed": seed}
    assert float(scores[seed, 5] - scores[seed, :5].max()) > 0.01
    judge = Judge(TINY / "target", 1e-3)
    assert judge.near_tie(PROMPT, [], last, second, 0, given) is edge


def test_what_else_is_a_mistake() -> None:
    judge = Judge(TINY / "target", 1e-4)
    request = Request(1, COMPLETIONS, {"prompt": PROMPT, "temperature": 0})
    wrong = Request(1, COMPLETIONS, {"temperature": -1}, "wrong")
    good, other_text = answered(5, 6), Answer(200, {0: Choice([5, 6], "b", "length")}, {0: PROMPT})
    for sent, answer, plain in (
        (request, good, answered(5)),
        (request, good, other_text),
        (request, Answer(500, message="failed"), good),
        (request, Answer(200, problem="the stream ended"), good),
        (request, Answer(200, {}, {}), good),
        (wrong, Answer(500), Answer(400)),
    ):
        problems, near_ties, _ = compare([(sent, answer)], {1: plain}, judge, logprob=1e-3)
        assert len(problems) == 1 and not near_ties, (answer, plain)
    ours = Request(1, COMPLETIONS, {"vllm_xargs": {"bastion_budget": -1}}, "ours")
    assert compare([(ours, Answer(200))], {}, judge, logprob=1e-3)[0]
    assert not compare([(ours, Answer(400))], {}, judge, logprob=1e-3)[0]


LATE = Answer(problem="no answer in 300 s", timed_out=True)


def test_a_timeout_of_the_plain_server_is_tried_again_and_then_not_compared() -> None:
    judge = Judge(TINY / "target", 1e-4)
    first, second, wrong = (
        Request(1, COMPLETIONS, {"prompt": PROMPT, "temperature": 0}),
        Request(2, COMPLETIONS, {"prompt": PROMPT, "temperature": 0}),
        Request(3, COMPLETIONS, {"temperature": -1}, "wrong"),
    )
    resent: list[int] = []

    def resend(request: Request) -> Answer:
        resent.append(request.number)
        return answered(5, 6) if request is first else LATE

    plain = repeat_timeouts([(first, LATE), (second, LATE), (wrong, LATE)], resend)
    assert resent == [1, 2, 3]
    seen = [(first, answered(5, 6)), (second, answered(7)), (wrong, Answer(400))]
    expected = {request.number: answer for request, answer in plain}
    problems, near_ties, counts = compare(seen, expected, judge, logprob=1e-3)
    assert not problems and not near_ties
    assert (counts["compared"], counts["not_compared"]) == (1, 2)
    # What the server with trees did wrong counts all the same.
    for answer in (LATE, Answer(500)):
        assert len(compare([(second, answer)], expected, judge, logprob=1e-3)[0]) == 1
    assert len(compare([(wrong, LATE)], expected, judge, logprob=1e-3)[0]) == 1


@pytest.mark.parametrize(("compared", "good"), [(9, True), (1, False), (0, False)])
def test_a_soak_that_compares_little_does_not_pass(compared: int, good: bool) -> None:
    phase = {"healthy": True, "tracebacks": 0, "left": {}}
    trees = phase | {"counters": {"spec_decode_num_drafts_total": 5.0}}
    counts = {"compared": compared, "not_compared": 1, "cut": 1}
    assert passed({**counts, "problems": [], "trees": trees, "plain": phase}) is good
