# SPDX-License-Identifier: Apache-2.0
"""The GPU path on a CPU: Triton kernels, the FlashAttention adapter, FULL graphs.

`flash_backend` and `cuda_graphs` say what stands in for the hardware. Tokens are compared with
those of plain decoding on vLLM's own CPU path.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import cases
from tests.e2e.compare import Comparison, answers, assert_winding, leaving_the_chain
from tests.e2e.engines import Batch, Engine, given_costs
from tests.e2e.marks import on_cpu
from tests.e2e.targets import SPEC, engine_of, make_scaled
from vllm_bastion.policy.cost.table import StepCostTable

pytestmark = on_cpu("stands in for a GPU")

SETUP = ["tests.e2e.flash_backend:install", "tests.e2e.cuda_graphs:install"]
REPLAYS = "tests.e2e.cuda_graphs:replays"
# Rows of the target's graphs, and of the drafter's: 16 for each of two requests.
TARGET_SIZES, DRAFTER_SIZES = [4, 8, 18], [16, 32]
# Rows of a step: the interpreter is slow on every token.
LIMIT = {"max_num_batched_tokens": 64}


def with_graphs(engine: Engine) -> Engine:
    compilation = {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": TARGET_SIZES + DRAFTER_SIZES[1:],
    }
    return engine.of(compilation_config=compilation, enforce_eager=False)


def batch() -> Batch:
    """Trees, a chain and a sampling request, joined by a prompt of two chunks."""
    out = Batch("trees, chains and prompt chunks")
    code, arithmetic, chat = (text for _, text in cases.some(1))
    out.add("code", code, temperature=0, max_tokens=12)
    out.add("chain", arithmetic, temperature=0, max_tokens=6, repetition_penalty=1.2)
    out.add("sampled", chat, temperature=0.8, seed=3, max_tokens=8)
    out.add("chunked", cases.long_prompt("code", 80), arrive=2, temperature=0, max_tokens=6)
    return out


def costs(folder: Path, timing: str) -> dict[str, str]:
    table = StepCostTable.linear(10.0, 0.4, max_rows=128)
    return {**given_costs(table, folder / "costs.json"), "budget_timing": timing}


def graphs_of(outcome: dict[str, Any]) -> list[dict[str, Any]]:
    return list({(g["of"], g["rows"]): g for g in outcome["probed"]}.values())


@pytest.mark.slow
@pytest.mark.parametrize("timing", ["exact", "lagged"])
def test_graphs_replay_what_decoding_needs(
    compare: Comparison, tmp_path: Path, timing: str
) -> None:
    """A captured launch learns about the step it is replayed for from buffers alone."""
    plain, requests = Engine(max_num_seqs=2, eager=True, extra=LIMIT).with_async(), [batch()]
    # As on a GPU: no copies, where the user does not ask for them.
    tree = with_graphs(plain).with_bastion(8, top_k=4, lookup=False, **costs(tmp_path, timing))
    futures = [
        compare.submit(plain, requests),
        compare.submit(tree, requests, setup=SETUP, probe=REPLAYS, interpreted=True),
    ]
    run = futures[1].result()
    compare.same(f"GPU path on a CPU, {timing}", requests, futures[0].result(), run)
    outcome = run["batches"][0]
    graphs = graphs_of(outcome)
    target = {g["rows"]: g["replays"] for g in graphs if g["of"] == "target"}
    assert sorted(target) == TARGET_SIZES
    assert sum(count > 0 for count in target.values()) > 1, target
    assert all("tree_attention_kernel" in g["kernels"] for g in graphs if g["of"] == "target")
    # The drafter's graph includes everything from its logits to the next tree and its budget.
    drafter = [g for g in graphs if g["of"] == "drafter"]
    assert sorted(g["rows"] for g in drafter) == DRAFTER_SIZES
    assert all(g["replays"] > 0 for g in drafter), drafter
    for g in drafter:
        assert {"expand_kernel", "_bits_kernel", "_choose_kernel"} <= set(g["kernels"])
    assert leaving_the_chain(outcome["paths"])


@pytest.mark.slow
@pytest.mark.parametrize("scales", [False, True])
def test_fp8_queries_and_caches(compare: Comparison, tmp_path: Path, scales: bool) -> None:
    """Plain decoding uses the same backend here: another one rounds to fp8 differently."""
    own = {"model": make_scaled(tmp_path / "scaled")} if scales else {"kv_cache_dtype": "fp8"}
    plain = Engine(max_num_seqs=2, eager=True, extra=own | LIMIT).with_async()
    requests = [batch()]
    expected = compare.run(plain, requests, setup=SETUP[:1], interpreted=True)
    tree = with_graphs(plain).with_bastion(8, top_k=4, **costs(tmp_path, "exact"))
    known = {"answers": answers(expected)}
    run = compare.run(tree, requests, setup=SETUP, oracle=known, interpreted=True)
    compare.same(
        f"GPU path on a CPU, float8, scales {scales}", requests, expected, run, plain,
        setup=SETUP[:1], interpreted=True,
    )  # fmt: skip
    assert_winding(run["batches"][0], longer_than=2)


@pytest.mark.slow
def test_gated_delta_states_with_graphs(compare: Comparison, tmp_path: Path) -> None:
    """Replayed launches write what acceptance needs to the buffers that acceptance reads."""
    engine = engine_of("qwen3-next", tmp_path / "target").of(**LIMIT).with_async()
    plain, requests = replace(engine, max_num_seqs=2, num_blocks=96), [batch()]
    expected = compare.run(plain, requests, **SPEC["qwen3-next"])
    run = compare.run(
        with_graphs(plain).with_bastion(8, top_k=4, **costs(tmp_path, "lagged")),
        requests,
        setup=[*SETUP, "tests.e2e.gdn_fp32:install_cuda"],
        oracle={"answers": answers(expected)},
        probe=REPLAYS,
        interpreted=True,
    )
    compare.same("GPU path on a CPU, recurrent states", requests, expected, run)
    outcome = run["batches"][0]
    graphs = [g for g in graphs_of(outcome) if g["of"] == "target"]
    assert all({"gated_delta_tree_kernel", "_conv_kernel"} <= set(g["kernels"]) for g in graphs)
    assert sum(g["replays"] > 0 for g in graphs) > 1, graphs
    assert_winding(outcome, longer_than=2)
