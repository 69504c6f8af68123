# SPDX-License-Identifier: Apache-2.0
"""After an update of its weights an engine is what a fresh engine with these weights is.

Not only tokens are equal but also every accepted path, to which the drafter's own copies of
weights contribute: its joined keys and values, and its head in int8.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.e2e import cases
from tests.e2e.compare import answers
from tests.e2e.engines import DRAFTER, GAMMA, TARGET, Batch, Engine, Runner
from tests.e2e.marks import on_cpu, slow
from tests.e2e.weight_updates import WEIGHTS, vary

pytestmark = on_cpu("copies weights on a CPU")

UPDATES = "tests.e2e.weight_updates"


def texts(case: str, first: int) -> Batch:
    return cases.texts(case, 1, first, prefix=f"{case}-", max_tokens=40, ignore_eos=True)


BEFORE, AFTER = texts("before an update", 20), texts("after an update", 21)


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
        slow("reload", "bfloat16", False),
        slow("reload", "float32", False),
        slow("in place", "bfloat16", True),
        slow("drafter", "bfloat16", True),
        slow("drafter", "bfloat16", False),
        slow("drafter", "float32", True),
    ],
)
def test_an_update_is_a_fresh_start(
    runner: Runner, tmp_path: Path, way: str, dtype: str, eager: bool
) -> None:
    if way == "drafter":
        path = vary(DRAFTER, tmp_path / "drafter", by=0.1, seed=2)
    else:
        path = vary(TARGET, tmp_path / "target", by=0.1, seed=1)
    if way == "in place":
        path = embeddings_of(path, tmp_path / "embeddings")
    plain = Engine(eager=eager).of(dtype=dtype)
    # How far copies are trusted was learned from the old weights' texts.
    sizes = {"nodes": GAMMA + 8, "budget": GAMMA + 8, "lookup": False}
    tree = plain.with_bastion(model=DRAFTER, **sizes)
    wish = {"additional_config": {"way": way, "path": path}}
    updated = tree.of(weight_transfer_config={"backend": "file"}, **wish)
    setup = [f"{UPDATES}:register", f"{UPDATES}:of_every_size"]
    run = runner.run(updated, [BEFORE, AFTER], setup=setup, probe=f"{UPDATES}:update")
    same = plain.with_bastion(model=path, **sizes) if way == "drafter" else tree.of(model=path)
    fresh = runner.run(same, [AFTER], setup=setup[1:])
    assert answers({"batches": run["batches"][1:]}) == answers(fresh)
    assert run["batches"][1]["paths"] == fresh["batches"][0]["paths"]


@pytest.mark.parametrize("way", ["transfer", slow("reload"), slow("drafter")])
def test_replies_of_old_weights_give_no_n_gram_drafts(
    runner: Runner, tmp_path: Path, way: str
) -> None:
    source = DRAFTER if way == "drafter" else TARGET
    wish = {"way": way, "path": vary(source, tmp_path / "varied", by=0.1, seed=3)}
    tree = Engine(eager=True).with_bastion(8, 8, ngram_cache=4096)
    tree = tree.of(weight_transfer_config={"backend": "file"}, additional_config=wish)
    run = runner.run(tree, [BEFORE], setup=[f"{UPDATES}:register"], probe=f"{UPDATES}:update")
    assert run["batches"][0]["probed"] == [[True, False]]
