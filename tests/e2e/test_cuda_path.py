# SPDX-License-Identifier: Apache-2.0
"""The GPU path on a CPU: the FlashAttention adapter, with the reference of tree attention.

`flash_backend` says what stands in for the hardware; `make rehearse` has FULL graphs. Plain
decoding uses the same backend: another one rounds to fp8 differently.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e import cases
from tests.e2e.compare import Comparison, answers, assert_winding
from tests.e2e.costs import linear
from tests.e2e.engines import Batch, Engine, Runner
from tests.e2e.marks import on_cpu
from tests.e2e.targets import make_scaled, make_target

pytestmark = on_cpu("stands in for a GPU", pytest.mark.slow)

SETUP = ["tests.e2e.flash_backend:install"]
# The interpreter is slow on every row of a step.
PLAIN = Engine(max_num_seqs=2, eager=True, extra={"max_num_batched_tokens": 64}).with_async()


def batch() -> Batch:
    """Trees, a chain and a sampling request, joined by a prompt of two chunks."""
    out = Batch("trees, chains and prompt chunks")
    code, arithmetic, chat = (text for _, text in cases.some(1))
    out.add("code", code, temperature=0, max_tokens=12)
    out.add("chain", arithmetic, temperature=0, max_tokens=6, repetition_penalty=1.2)
    out.add("sampled", chat, temperature=0.8, seed=3, max_tokens=8)
    out.add("chunked", cases.long_prompt("code", 80), arrive=2, temperature=0, max_tokens=6)
    return out


@pytest.mark.parametrize(
    ("caches", "timing"), [("auto", "lagged"), ("fp8", "exact"), ("checkpoint", "exact")]
)
def test_tokens_equal_plain_decoding(
    compare: Comparison, tmp_path: Path, caches: str, timing: str
) -> None:
    own: dict[str, Any] = {"kv_cache_dtype": caches}
    if caches == "checkpoint":  # with scales of its own
        own = {"model": make_scaled(tmp_path / "scaled")}
    plain, requests = PLAIN.of(**own), [batch()]
    expected = compare.run(plain, requests, setup=SETUP, interpreted=True)
    budget = "adaptive" if timing == "lagged" else 8
    tree = plain.with_bastion(8, budget, top_k=4, costs=linear(10.0, 0.4), budget_timing=timing)
    known = {"answers": answers(expected)}
    run = compare.run(tree, requests, setup=SETUP, oracle=known, interpreted=True)
    compare.same(
        f"GPU path on a CPU, caches {caches}", requests, expected, run, plain,
        setup=SETUP, interpreted=True,
    )  # fmt: skip
    assert_winding(run["batches"][0], longer_than=2)


@pytest.mark.parametrize(
    ("target", "window"), [("mistral-window-24", 23), ("gpt-oss-window-16", None)]
)
def test_plain_steps_are_planned_for_the_windows_of_all_layers(
    runner: Runner, tmp_path: Path, target: str, window: int | None
) -> None:
    """The first batch of an engine is no plain step. Layers with several windows have no plan."""
    engine = PLAIN.of(model=make_target(target, tmp_path / "target")).with_bastion(8, 0)
    watched = {"setup": SETUP, "probe": "tests.e2e.flash_backend:planned", "interpreted": True}
    run = runner.run(engine, [cases.greedy(1, tokens=4)], **watched)
    plans, in_graph = run["batches"][0]["probed"][-1].values()
    if window is None:
        assert not plans and not in_graph
    else:
        assert plans.count([1, window, 0]) >= 3
        assert all(plan[1:] == [window, 0] for plan in plans)
        assert in_graph == [[1, window, 0]]
