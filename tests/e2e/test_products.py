# SPDX-License-Identifier: Apache-2.0
"""Which matrix products a bf16 engine uses on a CPU: bf16, or int8 in the drafter."""

from __future__ import annotations

from typing import Any

import pytest

from bastion_kernels.cpu.linear import can_multiply, can_multiply_int8
from tests.e2e import cases
from tests.e2e.engines import GAMMA, ON_GPU, Batch, Engine, Runner
from tests.e2e.marks import slow

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        ON_GPU or not (can_multiply() or can_multiply_int8()), reason="for CPUs with own products"
    ),
]


def products(session: Any) -> list[dict[str, str]]:
    """Probe: the matrix product that each layer of target and drafter uses."""
    from vllm_bastion.cpu.linear import is_int8

    return [
        {
            name: "int8" if is_int8(layer) else layer.cpu_linear.__module__.rpartition(".")[2]
            for name, layer in model.named_modules()
            if hasattr(layer, "cpu_linear")
        }
        for model in (session.runner.model, session.runner.speculator.model)
    ]


@pytest.mark.parametrize(
    ("weights", "eager"),
    [
        ("auto", True),
        slow("checkpoint", True),
        # Compiled code calls them too, with "checkpoint" also from layers that "auto" leaves alone.
        slow("auto", False),
        slow("checkpoint", False),
    ],
    ids=["auto, eager", "checkpoint, eager", "auto", "checkpoint"],
)
def test_which_products_are_used(runner: Runner, weights: str, eager: bool) -> None:
    engine = Engine(max_num_seqs=2, eager=eager).of(dtype="bfloat16")
    engine = engine.with_bastion(GAMMA, GAMMA, drafter_weights=weights)
    batch = Batch("products")
    for name, text in cases.some(1, first=5):
        batch.add(name, text, max_tokens=32, ignore_eos=True)
    result = runner.run(
        engine, [batch],
        setup=["tests.e2e.weight_updates:of_every_size"],
        probe="tests.e2e.test_products:products",
    )["batches"][0]  # fmt: skip
    target, drafter = result["probed"][:2]
    ours = "linear" if can_multiply() else "utils"
    assert len(target) == 6 * 4 + 2 and set(target.values()) == {ours}
    in_int8 = [name for name, product in drafter.items() if product == "int8"]
    if weights == "auto" and can_multiply_int8():
        assert len(in_int8) == 3 * 4 + 1 and "lm_head" in in_int8
        assert not any(name.endswith("fc") for name in in_int8)
    else:
        assert in_int8 == [] and ours in drafter.values()
    for request in result["requests"].values():
        assert len(request["token_ids"]) == 32
    # The drafts are as good as this drafter's usually are: about three tokens a step.
    assert sum(map(len, result["paths"])) / len(result["paths"]) > 2


@pytest.mark.slow
def test_small_weights_keep_vllms_product(runner: Runner) -> None:
    engine = Engine(max_num_seqs=2, eager=True).of(dtype="bfloat16")
    engine = engine.with_bastion(GAMMA, GAMMA, drafter_weights="auto")
    batches, probe = [cases.greedy(1, tokens=4)], "tests.e2e.test_products:products"
    result = runner.run(engine, batches, probe=probe)["batches"][0]
    target, drafter = result["probed"][:2]
    assert set(target.values()) == {"utils"}
    assert ("int8" in drafter.values()) == can_multiply_int8()
