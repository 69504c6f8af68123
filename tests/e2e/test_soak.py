# SPDX-License-Identifier: Apache-2.0
"""2,000 random HTTP requests, 32 at a time: plain decoding's answers, and counts that add up."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

from tests.e2e import server as process
from tests.e2e.adapters import RANK, make_adapter
from tests.e2e.engines import TARGET, Runner
from tests.e2e.marks import on_cpu
from tests.e2e.test_random import random_requests
from tests.e2e.test_serving import OPTIONS, environment, serving
from vllm_bastion.config import NGRAM_DEPTH

pytestmark = on_cpu("starts CPU servers", pytest.mark.slow, pytest.mark.timeout(7200))

REQUESTS, AT_ONCE = 2000, 32
# Fewer seats than clients, and a cache that is too small for all: requests wait, some preempted.
LIMITS = (
    *("--max-model-len", "1024", "--max-num-seqs", "24", "--max-num-batched-tokens", "1024"),
    *("--block-size", "32", "--num-gpu-blocks-override", "160"),
    *("--enforce-eager", "--enable-lora", "--max-loras", "3", "--max-lora-rank", str(RANK)),
)
_COMPARED = ("index", "text", "token_ids", "finish_reason", "stop_reason")


def requests() -> list[dict[str, Any]]:
    rng, made = random.Random(7), random_requests(7, REQUESTS).requests
    for request in made:
        if rng.random() < 0.1:
            request["params"]["vllm_xargs"] = {"bastion_budget": rng.choice((0, 1, 5))}
        if rng.random() < 0.3:
            request["params"]["model"] = rng.choice("ab")
        # Plain vLLM with adapters dies of them on a CPU; nor may they be streamed.
        request["params"].pop("prompt_logprobs", None)
    return made


def ask(server: process.Server, request: dict[str, Any], gives_up: bool = False) -> Any:
    """An answer's choices, the status of a refusal, or the text until the client gives up."""
    body = {"prompt": request["prompt"], "return_token_ids": True, **request["params"]}
    try:
        if gives_up and "abort_after" in request:
            stream = server.stream("/v1/completions", **body)
            chunks = [chunk["choices"][0] for chunk in islice(stream, request["abort_after"])]
            stream.close()
            return "".join(chunk["text"] for chunk in chunks if chunk["index"] == 0)
        return server.post("/v1/completions", **body)["choices"]
    except HTTPError as refused:
        return refused.code


def differs(plain: Any, other: Any) -> bool:
    if isinstance(other, str):
        return not plain[0]["text"].startswith(other)
    if isinstance(other, int) or isinstance(plain, int):
        return bool(plain != other)
    for one, two in zip(plain, other, strict=True):
        if any(one[key] != two[key] for key in _COMPARED):
            return True
        if (logprobs := one["logprobs"]) is not None:
            values = two["logprobs"]["token_logprobs"]
            if logprobs["token_logprobs"] != pytest.approx(values, abs=1e-3):
                return True
    return False


def counts(server: process.Server) -> tuple[float, float]:
    """Tokens by vLLM's count and by ours, once every request has ended and all counts arrived."""
    last: tuple[float, ...] = ()
    for _ in range(60):
        time.sleep(2.0)
        text = server.get("/metrics")
        names = ("generation_tokens", "bastion_request_steps", "bastion_accepted_tokens")
        found = tuple(process.values(text, f"{name}_total") for name in names)
        if not process.values(text, "num_requests_running") and found == last:
            return found[0], found[1] + found[2]
        last = found
    raise AssertionError("requests still run")


def test_random_requests_of_a_server(runner: Runner, tmp_path: Path) -> None:
    made, adapters = requests(), enumerate("ab", 1)
    own = [f"{name}={make_adapter(TARGET, tmp_path / name, seed)}" for seed, name in adapters]
    limits = (*LIMITS, "--lora-modules", *own)
    env = environment(runner.caches) | {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        with process.serving([TARGET, *OPTIONS, *limits], env, tmp_path / "plain") as running:
            expected = list(pool.map(partial(ask, running), made))
        with serving(tmp_path / "bastion", runner.caches, *limits) as server:
            answers = list(pool.map(partial(ask, server, gives_up=True), made))
            generated, counted = counts(server)
            drafts = server.counters()["drafts"]
    for request, plain, other in zip(made, expected, answers, strict=True):
        if differs(plain, other):
            print(f"{request}\n  plain {plain}\n  bastion {other}")
    assert not sum(map(differs, expected, answers))
    assert 0 < sum(isinstance(plain, int) for plain in expected) < REQUESTS // 4
    assert drafts > REQUESTS // 4  # a busy machine decodes more in plain steps
    # A front end ends a request at a stop string, or if its client leaves, in the middle of a step.
    early = [answer for answer in answers if isinstance(answer, str)]
    every = [one for answer in answers if isinstance(answer, list) for one in answer]
    early += [one for one in every if isinstance(one["stop_reason"], str)]
    print(f"{generated:.0f} tokens, counted {counted:.0f}; {len(early)} answers ended early")
    assert 0 <= counted - generated <= len(early) * (NGRAM_DEPTH + 1)
