# SPDX-License-Identifier: Apache-2.0
"""Targets with quantised weights, against plain decoding with the same weights.

Formats that quantise a layer's inputs (W8A8, fp8) round every activation to a step of its row's
scale. A difference in the last bits of fp32, as between two ways to sum attention, moves some of
them by a whole step. So here two correct engines differ by more than 1e-4, with or without trees:
`test_quantised_inputs_magnify_rounding`. The other formats need bf16.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e import cases
from tests.e2e.compare import NEAR_TIE, NEAR_TIE_BF16, Comparison
from tests.e2e.engines import Batch, Engine, Runner
from tests.e2e.marks import on_cpu, slow
from tests.e2e.quantised import FORMATS, make_quantised

pytestmark = on_cpu("formats of vLLM's CPU kernels")

_TOKENS = 48
# Weights that vLLM itself quantises while it loads them, by its option `quantization`.
ONLINE = "fp8_per_channel"
# vLLM takes fp32 inputs, but for int8 on matrix registers.
_AMX = torch.cpu._is_amx_tile_supported()
_FP32 = ("fp8-per-channel",) if _AMX else ("w8a8", "fp8-per-channel")
_QUANTISES_INPUTS = ("w8a8", "fp8-per-channel")
QUICK = "w8a8"
# Near-ties in fp32 with quantised inputs: twice what two modes of plain decoding differ by.
_QUANTISED_INPUTS = 0.2


def requests(**more: Any) -> Batch:
    """Six greedy requests and six at T=1, of which four run at a time."""
    more |= {"max_tokens": _TOKENS, "ignore_eos": True}
    return cases.texts("quantised weights", 4, every=2, **more)


def engine_of(name: str, folder: Path) -> Engine:
    """Plain decoding in the format `name`, in fp32 where vLLM takes it."""
    plain = Engine(eager=True, num_blocks=160)
    plain = plain.of(dtype="float32" if name in _FP32 else "bfloat16")
    return (
        plain.of(quantization=name)
        if name == ONLINE
        else plain.of(model=make_quantised(name, folder))
    )


@pytest.mark.parametrize("name", [n if n == QUICK else slow(n) for n in (*FORMATS, ONLINE)])
def test_tokens_equal_plain_decoding(name: str, compare: Comparison, tmp_path: Path) -> None:
    plain, batches = engine_of(name, tmp_path / "target"), [requests()]
    expected, made = compare.all([plain, plain.with_bastion(24, 24)], batches)
    bound = _QUANTISED_INPUTS if name in _QUANTISES_INPUTS else NEAR_TIE_BF16
    compare.same(f"{name} weights", batches, expected, made, plain, near_tie=bound)
    asked = [run["batches"][0]["requests"] for run in (expected, made)]
    equal = sum(asked[0][key]["token_ids"] == asked[1][key]["token_ids"] for key in asked[0])
    assert equal >= len(asked[0]) * 2 // 3
    assert made["batches"][0]["forwards"] < expected["batches"][0]["forwards"]


def disagreement(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference of a token's log-probability, up to where two texts differ."""
    found = [0.0]
    for left, right in zip(
        *(run["batches"][0]["requests"].values() for run in (one, other)), strict=True
    ):
        for at, (token, same) in enumerate(zip(left["token_ids"], right["token_ids"])):
            if token != same:
                break
            values = (result["logprobs"][at][str(token)] for result in (left, right))
            found.append(abs(next(values) - next(values)))
    return max(found)


@pytest.mark.slow
@pytest.mark.skipif(_AMX, reason="vLLM multiplies int8 on matrix registers in bf16 alone")
def test_quantised_inputs_magnify_rounding(runner: Runner, tmp_path: Path) -> None:
    """Plain decoding, compiled or not: fp32 alone leaves less than a near-tie."""
    batches, found = [requests(logprobs=0)], []
    quantised = engine_of("w8a8", tmp_path / "target")
    for plain in (replace(quantised, extra={"dtype": "float32"}), quantised):
        found.append(disagreement(*runner.all([plain, replace(plain, eager=False)], batches)))
    print(f"log-probabilities differ by up to {found[0]:.1e} without, {found[1]:.1e} with")
    assert found[0] < NEAR_TIE < 10 * NEAR_TIE < found[1] < _QUANTISED_INPUTS
