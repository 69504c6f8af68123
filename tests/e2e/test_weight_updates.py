# SPDX-License-Identifier: Apache-2.0
"""After an update of its weights an engine is what a fresh engine with these weights is.

Not only tokens are equal but also every accepted path, to which the drafter's own copies of
weights contribute: its joined keys and values, and its head in int8.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from benchmarks import TINY
from tests.e2e import cases
from tests.e2e.engines import DRAFTER, GAMMA, ON_GPU, TARGET, Batch, Engine, Runner
from tests.e2e.weight_updates import WEIGHTS, vary

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(ON_GPU, reason="copies weights on a CPU")]

UPDATES = "tests.e2e.weight_updates"
slow = pytest.mark.slow


def texts(case: str, first: int) -> Batch:
    batch = Batch(case)
    for name, text in cases.some(1, first=first):
        batch.add(f"{case}-{name}", text, temperature=0, max_tokens=40, ignore_eos=True)
    return batch


BEFORE, AFTER = texts("before an update", 20), texts("after an update", 21)


def updated(engine: Engine, way: str, path: str) -> Engine:
    """The same engine, to be updated between two batches."""
    wishes = {"additional_config": {"way": way, "path": path}}
    transfer = {"weight_transfer_config": {"backend": "file"}}
    return replace(engine, extra=(*engine.extra, *wishes.items(), *transfer.items()))


def of(engine: Engine, **arguments: Any) -> Engine:
    """The same engine with other arguments of `LLM`."""
    return replace(engine, extra=(*engine.extra, *arguments.items()))


def run_updated(runner: Runner, engine: Engine, **spec: Any) -> dict[str, Any]:
    setup = [f"{UPDATES}:register", *spec.pop("setup", ())]
    probe = f"{UPDATES}:update"
    return runner.run(engine, [BEFORE, AFTER], setup=setup, probe=probe, **spec)


def embeddings_of(other: str, folder: Path) -> str:
    """The tiny target with another checkpoint's embeddings."""
    vary(TARGET, folder, by=0.0, seed=0)
    weights = load_file(folder / WEIGHTS)
    name = "model.embed_tokens.weight"
    weights[name] = load_file(Path(other) / WEIGHTS)[name]
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    return str(folder)


@pytest.mark.parametrize(
    ("way", "dtype", "eager"),
    [
        ("transfer", "bfloat16", True),
        pytest.param("reload", "bfloat16", False, marks=slow),
        pytest.param("reload", "float32", False, marks=slow),
        pytest.param("in place", "bfloat16", True, marks=slow),
        pytest.param("drafter", "bfloat16", True, marks=slow),
        pytest.param("drafter", "bfloat16", False, marks=slow),
        pytest.param("drafter", "float32", True, marks=slow),
        pytest.param("Domino drafter", "float32", True, marks=slow),
        pytest.param("Domino drafter", "bfloat16", True, marks=slow),
    ],
)
def test_an_update_is_a_fresh_start(
    runner: Runner, tmp_path: Path, way: str, dtype: str, eager: bool
) -> None:
    drafter = str(TINY / "domino") if way == "Domino drafter" else DRAFTER
    if way.endswith("drafter"):
        way, path = "drafter", vary(drafter, tmp_path / "drafter", by=0.1, seed=2)
    else:
        path = vary(TARGET, tmp_path / "target", by=0.1, seed=1)
    if way == "in place":
        path = embeddings_of(path, tmp_path / "embeddings")
    every_size = {"setup": [f"{UPDATES}:of_every_size"]}
    plain = of(Engine(eager=eager), dtype=dtype)
    # How far copies are trusted was learned from the old weights' texts.
    sizes = {"nodes": GAMMA + 8, "budget": GAMMA + 8, "lookup": False}
    tree = plain.with_bastion(model=drafter, **sizes)
    run = run_updated(runner, updated(tree, way, path), **every_size)
    if way == "drafter":
        fresh = plain.with_bastion(model=path, **sizes)
    else:
        fresh = of(tree, model=path)
    expected = runner.run(fresh, [AFTER], **every_size)["batches"][0]
    result = run["batches"][1]
    assert _tokens(result) == _tokens(expected)
    assert result["paths"] == expected["paths"]


@slow
def test_the_updates_matter(runner: Runner, tmp_path: Path) -> None:
    """Other weights give other texts, and another drafter other paths."""
    plain = of(Engine(eager=True), dtype="bfloat16")
    tree = plain.with_bastion(GAMMA + 8, GAMMA + 8)
    stale = runner.run(tree, [AFTER])["batches"][0]
    target = vary(TARGET, tmp_path / "target", by=0.1, seed=1)
    drafter = vary(DRAFTER, tmp_path / "drafter", by=0.1, seed=2)
    for engine in (of(tree, model=target), plain.with_bastion(23, 23, model=drafter)):
        other = runner.run(engine, [AFTER])["batches"][0]
        assert other["paths"] != stale["paths"]


def _tokens(outcome: dict[str, Any]) -> dict[str, list[int]]:
    return {name: result["token_ids"] for name, result in outcome["requests"].items()}
