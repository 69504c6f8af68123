# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts: their step costs are those of rows that reach many experts.

And their data-parallel ranks step together, also with a rank that has no work.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import cases
from tests.e2e.engines import ENVIRONMENT, ROOT, Engine, Runner
from tests.e2e.marks import on_cpu
from tests.e2e.targets import IMAGES, SPEC, make_target

pytestmark = on_cpu("random weights in fp32, and a CPU's router")
EXPERTS, CHOSEN = 32, 2
_FORWARDS: list[dict[str, Any]] = []


def watch() -> None:
    """Setup: record every forward pass of the target in the profile."""
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    from vllm_bastion.engine import profile

    time_steps, route = profile._time, CPURouter._compute_routing

    def routed(*args: Any, **kwargs: Any) -> Any:
        weights, experts = route(*args, **kwargs)
        _FORWARDS[-1]["experts"].append(len(experts.unique()))
        return weights, experts

    def timed(runner: Any) -> Any:
        hook = runner.model.register_forward_pre_hook(_forward, with_kwargs=True)
        CPURouter._compute_routing = routed
        try:
            return time_steps(runner)
        finally:
            CPURouter._compute_routing = route
            hook.remove()

    profile._time = timed


def _forward(_: Any, args: Any, given: dict[str, Any]) -> None:
    from vllm.forward_context import get_forward_context

    rows = given["inputs_embeds"] if given["input_ids"] is None else given["input_ids"]
    padding = get_forward_context().is_padding
    assert padding is not None
    _FORWARDS.append(
        {
            "rows": len(rows),
            "different": len(rows.unique(dim=0)),
            "padding": int(padding.sum()),
            "experts": [],
        }
    )


def seen(session: Any) -> list[dict[str, Any]]:
    """Probe: the forward passes of the engine's profile, with the experts of each layer."""
    return _FORWARDS if session.forwards == 1 else []


def _profiled(runner: Runner, target: str, **spec: Any) -> list[dict[str, Any]]:
    """Forward passes of the profile of an engine with this target."""
    plain = Engine(max_num_seqs=8, eager=True).of(model=target, **spec.pop("arguments", {}))
    engine = plain.with_bastion(15, costs=None)
    setup = [*spec.pop("setup", ()), "tests.e2e.test_experts:watch"]
    probe = "tests.e2e.test_experts:seen"
    run = runner.run(engine, [cases.greedy(1, tokens=4)], setup=setup, probe=probe, **spec)
    steps: list[dict[str, Any]] = run["batches"][0]["probed"]
    assert {step["rows"] for step in steps} >= {1, 4, 8, 16, 64}
    return steps


def test_the_profile_reaches_as_many_experts_as_random_rows(runner: Runner, tmp_path: Path) -> None:
    target = make_target("qwen3-moe", tmp_path / "target", num_experts=EXPERTS)
    for step in _profiled(runner, target):
        assert step["padding"] == 0, "a GPU's routers send such rows to no expert"
        assert step["different"] >= 0.8 * step["rows"]
        expected = EXPERTS * (1 - (1 - CHOSEN / EXPERTS) ** step["rows"])
        reached = sum(step["experts"]) / len(step["experts"])
        assert 0.75 * expected <= reached <= 1.25 * expected, step


@pytest.mark.slow
def test_rows_differ_where_the_target_takes_embeddings(runner: Runner, tmp_path: Path) -> None:
    """A target with images is given embeddings in place of tokens."""
    target = make_target("qwen3-vl", tmp_path / "target")
    spec = {"images": True, "arguments": IMAGES, "setup": SPEC["qwen3-vl"]["setup"][1:]}
    steps = _profiled(runner, target, **spec)
    assert all(step["different"] >= 0.8 * step["rows"] for step in steps)


def _two_ranks(engine: Engine, folder: Path, caches: dict[str, str]) -> list[dict[str, Any]]:
    """What two ranks decode: two prompts for long, and one of them briefly."""
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = []
    for rank, (prompts, tokens) in enumerate([(["def f(x):", "import"], 24), (["def f(x):"], 4)]):
        spec = {"engine": engine.arguments(), "prompts": prompts, "tokens": tokens,
                "costs": engine.costs}  # fmt: skip
        names = {"RANK": str(rank), "RANK_LOCAL": str(rank), "SIZE": "2",
                 "MASTER_IP": "127.0.0.1", "MASTER_PORT": port}  # fmt: skip
        environment = os.environ | ENVIRONMENT | caches | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        with (folder / f"{rank}.log").open("w") as log:
            ranks.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.e2e.data_parallel", json.dumps(spec),
                     str(folder / f"{rank}.json")],
                    env=environment | {f"VLLM_DP_{name}": value for name, value in names.items()},
                    cwd=ROOT, stdout=log, stderr=log,
                )
            )  # fmt: skip
    try:
        # A rank that fails leaves the other one waiting.
        while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
            time.sleep(0.5)
    finally:
        for rank in ranks:
            rank.kill()
    logs = [(folder / f"{rank}.log").read_text()[-4000:] for rank in range(2)]
    assert [rank.wait() for rank in ranks] == [0, 0], logs
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("measured", [False, True])
def test_two_data_parallel_ranks(runner: Runner, tmp_path: Path, measured: bool) -> None:
    """The tokens of plain ranks; when one rank is done, the other does not pay for its trees.

    Ranks that are measured together decide alone, so steps of one may be plain.
    """
    target = make_target("qwen3-moe", tmp_path / "target", num_experts=EXPERTS)
    plain = Engine(eager=True, extra={"model": target})
    expected = _two_ranks(plain, tmp_path / "plain", runner.caches)
    bastion = plain.with_bastion(15, **({"costs": None} if measured else {}))
    made = _two_ranks(bastion, tmp_path / "bastion", runner.caches)
    assert [rank["tokens"] for rank in made] == [rank["tokens"] for rank in expected]
    if measured:
        return
    steps = made[1]["steps"]
    idle = [step["ranks"] for step in steps if step["dummy"]]
    assert [step["ranks"] for step in made[0]["steps"][-len(idle) :]] == idle
    assert all(own == 1 for _, own in idle) and max(rows for rows, _ in idle) > 3
    # Both ranks had trees before.
    assert any(min(step["ranks"]) > 1 for step in steps[1:] if not step["dummy"])
