# SPDX-License-Identifier: Apache-2.0
"""A bf16 engine's drafter multiplies in int8 on a CPU; its target, and an fp32 engine, do not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.e2e import cases
from tests.e2e.engines import GAMMA, ON_GPU, Batch, Engine, Runner

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        ON_GPU or not torch.cpu._is_vnni_supported(), reason="for CPUs that multiply int8"
    ),
]


def in_int8(session: Any) -> list[list[str]]:
    """Probe: the layers of target and drafter whose product is ours."""
    return [
        [
            name
            for name, layer in model.named_modules()
            if "cpu.int8" in getattr(getattr(layer, "cpu_linear", None), "__module__", "")
        ]
        for model in (session.runner.model, session.runner.speculator.model)
    ]


@pytest.mark.parametrize("weights", ["auto", "checkpoint"])
def test_the_drafter_alone(runner: Runner, weights: str) -> None:
    engine = Engine(max_num_seqs=2, eager=True).with_bastion(GAMMA, GAMMA, drafter_weights=weights)
    batch = Batch("int8 drafters")
    for name, text in cases.some(1, first=5):
        batch.add(name, text, max_tokens=32, ignore_eos=True)
    result = runner.run(
        replace(engine, extra=(("dtype", "bfloat16"),)), [batch],
        probe="tests.e2e.test_int8_drafter:in_int8",
    )["batches"][0]  # fmt: skip
    target, drafter = result["probed"][:2]
    assert target == []
    if weights == "auto":
        assert len(drafter) == 3 * 4 + 1 and "lm_head" in drafter
        assert not any(name.endswith("fc") for name in drafter)
    else:
        assert drafter == []
    for request in result["requests"].values():
        assert len(request["token_ids"]) == 32
    # Drafts as good as one would expect of this drafter: it emits some three tokens a step.
    assert sum(map(len, result["paths"])) / len(result["paths"]) > 2
