# SPDX-License-Identifier: Apache-2.0
"""Targets of other architectures: windows, sinks, mixtures of experts, against plain decoding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e import cases
from tests.e2e.compare import Comparison, assert_winding
from tests.e2e.drafters import make_drafter
from tests.e2e.engines import Batch
from tests.e2e.marks import on_cpu
from tests.e2e.targets import SPEC, TARGETS, engine_of

pytestmark = on_cpu("random weights in fp32")
QUICK = (("gpt-oss-window-16", "right"),)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("targets")


def past_the_windows() -> Batch:
    """Contexts of up to 260 tokens, prefilled in chunks while other requests decode."""
    batch = Batch("other targets, contexts past their windows")
    long = {"max_tokens": 32, "ignore_eos": True}
    batch.add("greedy", cases.long_prompt("code", 60), temperature=0, max_tokens=100)
    batch.add("sampled", cases.long_prompt("chat", 200), temperature=0.8, seed=1, **long)
    batch.add("chunked", cases.long_prompt("arithmetic", 230), arrive=4, temperature=0, **long)
    batch.add("chain", cases.long_prompt("code", 33), temperature=0, max_tokens=32,
              structured_outputs={"regex": "(ab|cd){5,9}[0-9]{4} (yes|no)"})  # fmt: skip
    batch.add("late", cases.long_prompt("chat", 9), arrive=8, temperature=0.8, seed=2, **long)
    return batch


@pytest.mark.parametrize(
    ("name", "drafts"),
    [
        pytest.param(name, drafts, marks=[] if (name, drafts) in QUICK else pytest.mark.slow)
        for name in TARGETS
        for drafts in ("right", "noise")
    ],
)
def test_tokens_equal_plain_decoding(
    name: str, drafts: str, compare: Comparison, folder: Path
) -> None:
    batches, spec_keys = [past_the_windows()], SPEC.get(name, {})
    plain = engine_of(name, folder / name)
    if drafts == "noise":
        lagged = plain.with_bastion(24, 24, budget_timing="lagged").with_async()
        expected = compare.run(plain, batches, **spec_keys)
        run = compare.run(lagged, batches, oracle={"answers": {}}, **spec_keys)
        compare.same(f"{name}, noise, lagged", batches, expected, run, plain, **spec_keys)
        return
    tree = plain.with_bastion(24, 24)
    _, run = compare.oracle(f"{name}, oracle", batches, plain, tree, **spec_keys)
    assert_winding(run["batches"][0])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dflash2", "specforge-dspark"])
def test_a_hybrid_target_with_a_head_over_candidates(
    kind: str, compare: Comparison, folder: Path
) -> None:
    """The two drafters that are published for Qwen3.8-27B, which has this target's layers."""
    name = "qwen3.5-with-images"
    plain = engine_of(name, folder / kind)
    tree = plain.with_bastion(24, 24, model=make_drafter(kind, folder / f"{kind}-drafter"))
    _, made = compare.both(f"{name}, {kind}", [past_the_windows()], plain, tree, **SPEC[name])
    assert sum(made["batches"][0]["verified"]) > 24


@pytest.mark.slow
def test_gated_delta_states_in_a_compiled_engine(compare: Comparison, folder: Path) -> None:
    name = "qwen3-next"
    plain = engine_of(name, folder / "compiled")
    tree = replace(plain, eager=False).with_bastion(24, 24)
    label = f"{name}, compiled"
    _, run = compare.oracle(label, [past_the_windows()], plain, tree, **SPEC[name])
    assert max(map(len, run["batches"][0]["paths"])) > 4
