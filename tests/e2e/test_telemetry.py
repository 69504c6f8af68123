# SPDX-License-Identifier: Apache-2.0
"""Metrics of trees against what was seen in the engine: offline and through a server."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks.random_drafter import write_random
from tests.e2e import cases
from tests.e2e.engines import DRAFTER, GAMMA, ON_GPU, Engine, Runner
from tests.e2e.server import Server, values
from tests.e2e.test_serving import SPECULATIVE, serving
from vllm_bastion.config import NGRAM_DEPTH
from vllm_bastion.page import snapshot

pytestmark = [pytest.mark.e2e]

NODES = 32
_DETAILED = {"per_request_spec_decode_metrics": "detailed"}
ENGINE = Engine(eager=True, extra=_DETAILED).with_bastion(NODES)


def test_metrics_are_what_the_engine_did(runner: Runner) -> None:
    """`llm.get_metrics()`, vLLM's counters and ours, against the target's batches."""
    run = runner.run(ENGINE, [cases.greedy(2)])["batches"][0]
    metrics = run["metrics"]
    nodes = [count for count in run["verified"] if count]
    depths = [len(p) - 1 for p, count in zip(run["paths"], run["verified"], strict=True) if count]
    assert metrics["spec_decode_num_drafts"] == len(nodes) > 0
    assert metrics["spec_decode_num_draft_tokens"] == sum(nodes)
    assert metrics["spec_decode_num_accepted_tokens"] == sum(depths)
    by_position = metrics["spec_decode_num_accepted_tokens_per_pos"]
    assert by_position == [sum(depth > at for depth in depths) for at in range(NGRAM_DEPTH)]

    steps = {
        tuple(name.split("/")[1:]): count
        for name, count in metrics.items()
        if name.startswith("bastion_steps/")
    }
    kinds = {kind: sum(n for key, n in steps.items() if key[0] == kind) for kind, _ in steps}
    assert kinds["tree"] > 0 and set(kinds) <= {"tree", "n-gram", "plain", "prompt"}
    accepted = metrics["bastion_accepted_tokens"]
    tokens = sum(len(result["token_ids"]) for result in run["requests"].values())
    assert metrics["bastion_request_steps"] + accepted == tokens
    assert 0 < accepted <= sum(depths)
    assert metrics["bastion_expected_tokens"] > 0
    timed = {name for name in metrics if name.startswith("bastion_timed_steps/")}
    assert 0 < sum(metrics[name] for name in timed) <= sum(kinds.values())
    assert metrics["bastion_step_ms" + min(timed).removeprefix("bastion_timed_steps")] > 0


def test_a_requests_own_metrics_have_its_trees(runner: Runner) -> None:
    """`--per-request-spec-decode-metrics detailed`: nodes and accepted tokens of every tree."""
    run = runner.run(ENGINE, [cases.greedy(2)])["batches"][0]
    trees = list(zip(run["path_requests"], run["verified"], run["paths"], strict=True))
    for name, result in run["requests"].items():
        own = [(nodes, len(path) - 1) for request, nodes, path in trees if request == name]
        drafted = [(nodes, accepted) for nodes, accepted in own if nodes]
        found = result["spec_decode_metrics"]
        assert found["per_step_drafted"] == [nodes for nodes, _ in drafted]
        assert found["per_step_accepted"] == [accepted for _, accepted in drafted]
        assert found["num_spec_steps"] == len(drafted) > 0
        assert len(found["acceptance_histogram"]) == max(GAMMA, NGRAM_DEPTH) + 1


def ask_all(server: Server, tokens: int) -> None:
    def ask(prompt: str) -> int:
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return int(server.post("/v1/completions", **body)["usage"]["completion_tokens"])

    prompts = [text for _, text in cases.some(4)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, prompts)) == [tokens] * len(prompts)


def cpu_server(test: Any) -> Any:
    return pytest.mark.slow(pytest.mark.skipif(ON_GPU, reason="starts a CPU server")(test))


@cpu_server
@pytest.mark.parametrize("options", [(), ("--api-server-count", "2")], ids=["one", "two"])
def test_the_servers_metrics_are_whole(
    runner: Runner, tmp_path: Path, options: tuple[str, ...]
) -> None:
    """However many API servers there are, /metrics of any has all trees, and the line is logged."""
    short = {"VLLM_LOG_STATS_INTERVAL": "1"}
    with serving(tmp_path / "log", runner.caches | short, *options) as server:
        ask_all(server, 48)
        for _ in range(4):  # either of two servers may answer
            text = server.get("/metrics")
            by_source = values(text, "bastion_nodes_by_source_total")
            assert values(text, "spec_decode_num_draft_tokens_total") == by_source > 0
            accepted = values(text, "bastion_accepted_tokens_total")
            assert 0 < accepted <= values(text, "spec_decode_num_accepted_tokens_total")
            tokens = values(text, "bastion_request_steps_total") + accepted
            assert values(text, "generation_tokens_total") == tokens
            assert values(text, "bastion_steps_total", kind="tree") > 0
            found = snapshot(text)
            trees = values(text, "spec_decode_num_drafts_total")
            assert (found["trees"], found["nodes"]) == (trees, by_source)
            own = [line for line in text.splitlines() if line.startswith("vllm:bastion_")]
            assert all('engine="0"' in line and "model_name=" in line for line in own)
        # vLLM logs statistics once a second here, and with several API servers never.
        time.sleep(3.0)
    log = (tmp_path / "log").read_text()
    lines = re.findall(r"Engine 000: Bastion: .* nodes and .* accepted tokens per tree", log)
    assert bool(lines) == (not options), log[-3000:]
    assert "does not fit the target" not in log


@cpu_server
def test_a_running_server_warns_of_its_drafter(runner: Runner, tmp_path: Path) -> None:
    """One with random weights: a line, and no more."""
    drafter = tmp_path / "random"
    write_random(Path(DRAFTER), drafter)
    keys = {**SPECULATIVE, "model": str(drafter), "bastion_budget": 8}
    with serving(tmp_path / "log", runner.caches, "--enforce-eager", speculative=keys) as server:
        ask_all(server, 96)
    log = (tmp_path / "log").read_text()
    (trees,) = re.findall(r"drafter does not fit the target: (\d+) trees", log)
    assert int(trees) >= 128


@cpu_server
def test_data_parallel_engines_have_metrics_each(runner: Runner, tmp_path: Path) -> None:
    """Ranks of a dense model are engines of their own, with vLLM's label."""
    options = ("--data-parallel-size", "2", "--enforce-eager")
    with serving(tmp_path / "log", runner.caches, *options) as server:
        ask_all(server, 32)
        text = server.get("/metrics")
    for engine in ("0", "1"):
        by_source = values(text, "bastion_nodes_by_source_total", engine=engine)
        drafted = values(text, "spec_decode_num_draft_tokens_total", engine=engine)
        assert drafted == by_source > 0
        assert values(text, "bastion_steps_total", engine=engine, kind="tree") > 0
