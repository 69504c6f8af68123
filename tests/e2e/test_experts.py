# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts: their step costs are those of rows that reach many experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e import cases
from tests.e2e.engines import ON_GPU, Engine, Runner
from tests.e2e.targets import IMAGES, SPEC, make_target

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(ON_GPU, reason="random weights in fp32, and a CPU's router"),
]
EXPERTS, CHOSEN = 32, 2


def _calibrated(runner: Runner, target: str, **spec: Any) -> list[dict[str, Any]]:
    """Forward passes of the calibration of an engine with this target."""
    extra = {"model": target, **spec.pop("arguments", {})}
    engine = Engine(max_num_seqs=8, eager=True, extra=tuple(extra.items())).with_bastion(15)
    setup = [*spec.pop("setup", ()), "tests.e2e.experts_probe:watch"]
    probe = "tests.e2e.experts_probe:seen"
    run = runner.run(engine, [cases.greedy(1, tokens=4)], setup=setup, probe=probe, **spec)
    steps: list[dict[str, Any]] = run["batches"][0]["probed"]
    assert {step["rows"] for step in steps} >= {1, 4, 8, 16, 64}
    return steps


def test_calibration_reaches_as_many_experts_as_random_rows(runner: Runner, tmp_path: Path) -> None:
    target = make_target("qwen3-moe", tmp_path / "target", num_experts=EXPERTS)
    for step in _calibrated(runner, target):
        assert step["padding"] == 0, "a GPU's routers send such rows to no expert"
        assert step["different"] == step["rows"]
        expected = EXPERTS * (1 - (1 - CHOSEN / EXPERTS) ** step["rows"])
        reached = sum(step["experts"]) / len(step["experts"])
        assert 0.75 * expected <= reached <= 1.25 * expected, step


@pytest.mark.slow
def test_rows_differ_where_the_target_takes_embeddings(runner: Runner, tmp_path: Path) -> None:
    """A target with images is given embeddings in place of tokens."""
    target = make_target("qwen3-vl", tmp_path / "target")
    spec = {"images": True, "arguments": IMAGES, "setup": SPEC["qwen3-vl"]["setup"][1:]}
    steps = _calibrated(runner, target, **spec)
    assert all(step["different"] == step["rows"] for step in steps)
