# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` with method "bastion": OpenAI requests, streams, metrics and start-up errors."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import cases
from tests.e2e import server as process
from tests.e2e.engines import DRAFTER, ENVIRONMENT, ROOT, TARGET, Engine, Runner
from tests.e2e.marks import on_cpu, slow
from tests.e2e.server import Server
from vllm_bastion.config import NGRAM_DEPTH

pytestmark = on_cpu("starts a CPU server")

NODES = 32
SPECULATIVE = {"method": "bastion", "model": DRAFTER, "num_speculative_tokens": NODES}
# Everything else is vLLM's default.
OPTIONS = ["--dtype", "float32", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]


def environment(caches: dict[str, str]) -> dict[str, str]:
    """The environment of a user on a CPU host; only the cache folders are the test's own."""
    env = {**os.environ, **ENVIRONMENT, **caches, "VLLM_LOGGING_LEVEL": "INFO"}
    for name in ("ENABLE_V1_MULTIPROCESSING", "USE_V2_MODEL_RUNNER"):
        env.pop(f"VLLM_{name}", None)
    env.pop("TRITON_INTERPRET", None)
    return env


def serving(
    log: Path,
    caches: dict[str, str],
    *options: str,
    speculative: dict[str, Any] = SPECULATIVE,
    target: str = TARGET,
    vllm: Sequence[str] = process.VLLM,
) -> AbstractContextManager[Server]:
    """A server that is ready; `options` are further ones of `vllm serve`."""
    given = [target, *OPTIONS, "--speculative-config", json.dumps(speculative), *options]
    return process.serving(given, environment(caches), log, vllm)


# Compiling for the default limits of a step and timing such steps take a minute.
SMALL = ("--enforce-eager", "--max-num-seqs", "4", "--max-num-batched-tokens", "256")


@pytest.fixture(scope="module", params=[SMALL, slow(())], ids=["small", "vLLM's defaults"])
def server(
    runner: Runner, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("serve") / "log"
    # The small one forks its engine: vLLM would spawn it on a CPU, and import itself once more.
    vllm = process.FORKING_VLLM if request.param is SMALL else process.VLLM
    with serving(log, runner.caches, *request.param, vllm=vllm) as running:
        yield running


@pytest.fixture(scope="module")
def plain(runner: Runner) -> dict[str, Any]:
    """The same prompts decoded by a plain engine, which runs beside the server."""
    batch = cases.texts("serving", 1, first=25, max_tokens=40)
    seeded = {"temperature": 1.0, "seed": 5, "top_p": 0.9, "max_tokens": 40}
    batch.add("seeded", cases.prompts()["chat"][26], **seeded)
    return {"batch": batch, "run": runner.submit(Engine(max_num_seqs=2, eager=True), [batch])}


def test_answers_streams_and_counters(plain: dict[str, Any], server: Server) -> None:
    """Completions, plain and streamed, give plain decoding's text; the counters add up."""
    before = server.counters()
    expected = plain["run"].result()["batches"][0]["requests"]
    emitted = 0
    for request in plain["batch"].requests:
        body = {"prompt": request["prompt"], **request["params"]}
        answer = server.post("/v1/completions", **body)
        assert answer["choices"][0]["text"] == expected[request["id"]]["text"], request["id"]
        assert answer["choices"][0]["finish_reason"] == expected[request["id"]]["finish_reason"]
        emitted += answer["usage"]["completion_tokens"]
        chunks = list(server.stream("/v1/completions", **body))
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        assert text == answer["choices"][0]["text"]
        emitted += answer["usage"]["completion_tokens"]
    after = server.counters()
    gained = {name: after[name] - before.get(name, 0) for name in after}
    depth = min(NODES, NGRAM_DEPTH)
    positions = [gained[f"accepted_tokens_per_pos/{i}"] for i in range(depth)]
    assert f"accepted_tokens_per_pos/{depth}" not in gained
    assert positions == sorted(positions, reverse=True)
    assert sum(positions) == gained["accepted_tokens"]
    assert 0 < gained["drafts"] <= emitted
    assert gained["draft_tokens"] <= NODES * gained["drafts"]
    assert gained["accepted_tokens"] <= gained["draft_tokens"]
    # Every step emits the accepted tokens and one more; a request's last step may be cut short.
    requests = 2 * len(plain["batch"].requests)
    total = requests + gained["plain_steps"] + gained["drafts"] + gained["accepted_tokens"]
    assert emitted <= total <= emitted + requests * (depth + 1)


def test_chat_stream(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "Hi, can you help me plan my week?"}],
            "temperature": 0, "max_tokens": 24}  # fmt: skip
    answer = server.post("/v1/chat/completions", **body)["choices"][0]["message"]["content"]
    chunks = list(server.stream("/v1/chat/completions", **body))
    deltas = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks]
    assert answer
    assert "".join(deltas) == answer


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.8, "seed": 3}])
def test_tool_call(sampling: dict[str, Any], server: Server) -> None:
    """Tool arguments match the schema, streamed or not."""
    tool = {"name": "find", "description": "d", "parameters": cases.PERSON, "strict": True}
    body = {"messages": [{"role": "user", "content": "Who is it?"}], "max_tokens": 120, **sampling,
            "tools": [{"type": "function", "function": tool}],
            "tool_choice": {"type": "function", "function": {"name": "find"}},
            # Otherwise a model this small fills the JSON text with blanks.
            "allowed_token_ids": cases.words(), "frequency_penalty": 2}  # fmt: skip
    message = server.post("/v1/chat/completions", **body)["choices"][0]["message"]
    call = message["tool_calls"][0]["function"]
    assert call["name"] == "find"
    found = json.loads(call["arguments"])
    assert set(found) == set(cases.PERSON["properties"]) and found["age"] in (7, 44)

    streamed: dict[str, str] = {"name": "", "arguments": ""}
    for chunk in server.stream("/v1/chat/completions", **body):
        for part in chunk["choices"][0]["delta"].get("tool_calls") or []:
            for key, text in part["function"].items():
                streamed[key] += text or ""
    assert streamed["name"] == "find"
    assert json.loads(streamed["arguments"]) == found


def test_requests_with_grammar_and_penalties(server: Server) -> None:
    answer = server.post(
        "/v1/completions", prompt="Answer: ", temperature=0, max_tokens=16,
        structured_outputs={"choice": ["positive", "negative"]},
    )  # fmt: skip
    assert answer["choices"][0]["text"] in ("positive", "negative")
    answer = server.post(
        "/v1/completions", prompt="a a a a", temperature=0, max_tokens=8, repetition_penalty=1.5,
        logprobs=2,
    )  # fmt: skip
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == answer["usage"]["completion_tokens"]


def test_a_requests_own_budget(server: Server) -> None:
    """0 is plain decoding with the same text; a wrong one gets status 400, and the server lives."""
    given = {"prompt": "def add(a, b):", "temperature": 0, "max_tokens": 12}
    text = server.post("/v1/completions", **given)["choices"][0]["text"]
    before = server.counters()["draft_tokens"]
    plain = server.post("/v1/completions", **given, vllm_xargs={"bastion_budget": 0})
    assert plain["choices"][0]["text"] == text
    assert server.counters()["draft_tokens"] == before
    said = server.refusal("/v1/completions", **given, vllm_xargs={"bastion_budget": -1})
    assert '"bastion_budget" in extra_args' in said
    assert server.post("/v1/completions", **given)["choices"][0]["text"] == text


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"allowed_token_ids": [65] * 1025}, "allowed_token_ids has 1025 entries"),
        ({"stop_token_ids": list(range(2, 140)), "min_tokens": 2}, "stop_token_ids has 13"),
        ({"bad_words": ["a long bad word " * 30 + str(i) for i in range(20)]}, "bad_words have"),
    ],
)
def test_a_request_beyond_the_workers_tables(
    given: dict[str, Any], named: str, server: Server
) -> None:
    """It gets status 400 with the reason, and the server goes on."""
    asked = {"prompt": "x = ", "max_tokens": 8, "temperature": 0}
    assert named in server.refusal("/v1/completions", **asked, **given)
    answer = server.post("/v1/completions", **asked)
    assert answer["usage"]["completion_tokens"] > 0


def test_a_client_that_hangs_up(server: Server) -> None:
    """Its request ends, others go on."""
    body = {"prompt": "def add(a, b):", "temperature": 0, "max_tokens": 400, "ignore_eos": True}
    stream = server.stream("/v1/completions", **body)
    assert next(stream)["choices"][0]["text"]
    stream.close()
    assert server.post("/v1/completions", prompt="x = ", max_tokens=4)["choices"][0]["text"]
    deadline = time.monotonic() + 60.0
    while process.values(server.get("/metrics"), "num_requests_running"):
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.slow
def test_bench_serve(runner: Runner, tmp_path: Path) -> None:
    """`vllm bench serve` reports the acceptance of a server that drafts in every step."""
    keys = SPECULATIVE | {"bastion_budget": 8}
    with serving(tmp_path / "log", runner.caches, *SMALL, speculative=keys) as server:
        printed = runner.command(
            "bench", "serve", "--backend", "openai", "--base-url", server.url, "--model", TARGET,
            "--dataset-name", "random", "--random-input-len", "40", "--random-output-len", "24",
            "--num-prompts", "4", "--ready-check-timeout-sec", "0",
        )  # fmt: skip
        counted = server.counters()
    assert "Successful requests:                     4" in printed
    found = {name: float(number) for name, number in re.findall(r"(.+?): +([\d.]+) *\n", printed)}
    assert found["Drafts"] == counted["drafts"] > 4
    assert found["Draft tokens"] == counted["draft_tokens"]
    assert found["Accepted tokens"] == counted["accepted_tokens"]
    length = 1 + counted["accepted_tokens"] / counted["drafts"]
    assert found["Acceptance length"] == pytest.approx(length, abs=0.006)


@pytest.mark.slow
def test_wrong_configuration(runner: Runner) -> None:
    """An unknown key ends the start with one sentence that names it, and no traceback."""
    wrong = SPECULATIVE | {"bastion_budgte": 8}
    done = subprocess.run(
        [*process.VLLM, "serve", TARGET, *OPTIONS, "--speculative-config", json.dumps(wrong)],
        env=environment(runner.caches), cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    last = next(line for line in reversed(done.stderr.splitlines()) if "vllm serve" in line)
    assert last.startswith('vllm serve: unknown key "bastion_budgte"')
    assert 'did you mean "bastion_budget"?' in last
    assert "Traceback" not in done.stderr + done.stdout
