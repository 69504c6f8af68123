# SPDX-License-Identifier: Apache-2.0
"""Targets of other architectures: windows, sinks, mixtures of experts, against plain decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e import cases
from tests.e2e.compare import Comparison
from tests.e2e.engines import ON_GPU, Batch, Engine, Runner
from tests.e2e.targets import TARGETS, make_target

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(ON_GPU, reason="random weights in fp32"),
]
QUICK = ("gpt-oss-window-16",)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the targets' checkpoints are."""
    return tmp_path_factory.mktemp("targets")


def past_the_windows() -> Batch:
    """Contexts of up to 260 tokens, prefilled in chunks beside others that decode."""
    batch = Batch("other targets, contexts past their windows")
    long = {"max_tokens": 32, "ignore_eos": True}
    batch.add("greedy", cases.long_prompt("code", 60), temperature=0, max_tokens=100)
    batch.add("sampled", cases.long_prompt("chat", 200), temperature=0.8, seed=1, **long)
    batch.add("chunked", cases.long_prompt("arithmetic", 230), arrive=4, temperature=0, **long)
    batch.add("late", cases.long_prompt("chat", 9), arrive=8, temperature=0.8, seed=2, **long)
    return batch


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in TARGETS]
)
def test_tokens_are_plain_decodings(
    name: str, runner: Runner, compare: Comparison, folder: Path
) -> None:
    target = make_target(name, folder / name)
    batches = [past_the_windows()]
    extra: tuple[tuple[str, Any], ...] = (("model", target),)
    plain = Engine(eager=True, num_blocks=160, extra=extra)
    expected = runner.run(plain, batches)
    answers = {
        request: result["token_ids"]
        for request, result in expected["batches"][0]["requests"].items()
    }
    tree = plain.with_bastion(24, 24)
    known = runner.submit(tree, batches, oracle={"answers": answers})
    unknown = runner.submit(tree.with_async(), batches)
    compare.same(f"{name}, oracle", batches, expected, known.result())
    compare.same(f"{name}, random drafter", batches, expected, unknown.result())
    paths = known.result()["batches"][0]["paths"]
    assert any(path != list(range(len(path))) for path in paths)
    assert max(map(len, paths)) > 4
