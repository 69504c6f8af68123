# SPDX-License-Identifier: Apache-2.0
"""Targets with quantised weights, against plain decoding with the same weights; drafters, too.

Formats that quantise a layer's inputs (W8A8, fp8) round every activation to a step of its row's
scale. A difference in the last bits of fp32, as between two ways to sum attention, moves some of
them by a whole step. So here two correct engines differ by more than 1e-4, with or without trees.
The other formats need bf16.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.e2e import cases
from tests.e2e.compare import NEAR_TIE, NEAR_TIE_BF16, Comparison
from tests.e2e.drafters import make_drafter
from tests.e2e.engines import DRAFTER, Batch, Engine
from tests.e2e.marks import on_cpu, slow
from tests.e2e.quantised import FORMATS, make_quantised

pytestmark = on_cpu("formats of vLLM's CPU kernels")

# Weights that vLLM itself quantises while it loads them, by its option `quantization`.
ONLINE = "fp8_per_channel"
# vLLM takes fp32 inputs, but for int8 on matrix registers.
_AMX = torch.cpu._is_amx_tile_supported()
_FP32 = ("fp8-per-channel",) if _AMX else ("w8a8", "fp8-per-channel")
_QUANTISES_INPUTS = ("w8a8", "fp8-per-channel")
QUICK = "w8a8"
PLAIN = Engine(eager=True, num_blocks=160)
_SETUP = ["tests.e2e.quantised:multiply_w4a16"]
# Near-ties in fp32 with quantised inputs: twice what two modes of plain decoding differ by.
_QUANTISED_INPUTS = 0.2


def requests() -> Batch:
    """Six greedy requests and six at T=1, of which four run at a time."""
    return cases.texts("quantised weights", 4, every=2, max_tokens=48, ignore_eos=True)


def engine_of(name: str, folder: Path) -> Engine:
    """Plain decoding in the format `name`, in fp32 where vLLM takes it."""
    own = {"quantization": name} if name == ONLINE else {"model": make_quantised(name, folder)}
    return PLAIN.of(dtype="float32" if name in _FP32 else "bfloat16", **own)


@pytest.mark.parametrize("name", [n if n == QUICK else slow(n) for n in (*FORMATS, ONLINE)])
def test_tokens_equal_plain_decoding(name: str, compare: Comparison, tmp_path: Path) -> None:
    plain, batches = engine_of(name, tmp_path / "target"), [requests()]
    engines = [plain, plain.with_bastion(24, 24)]
    expected, made = compare.all(engines, batches, setup=_SETUP)
    bound = _QUANTISED_INPUTS if name in _QUANTISES_INPUTS else NEAR_TIE_BF16
    compare.same(f"{name} weights", batches, expected, made, plain, bound, setup=_SETUP)
    asked = [run["batches"][0]["requests"] for run in (expected, made)]
    equal = sum(asked[0][key]["token_ids"] == asked[1][key]["token_ids"] for key in asked[0])
    assert equal >= len(asked[0]) * 2 // 3
    assert made["batches"][0]["forwards"] < expected["batches"][0]["forwards"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_quantised_drafter(name: str, kind: str, compare: Comparison, tmp_path: Path) -> None:
    """Of an unquantised target: its tokens, in about as many steps as with whole weights."""
    whole = DRAFTER if kind == "dflash" else make_drafter(kind, tmp_path / "whole")
    parts = ("_proj", "fc") if kind == "dflash" else ("o_proj", "gate_proj", "up_proj", "down_proj")
    small = make_quantised(name, tmp_path / "small", whole, parts)
    near_tie, dtype = (NEAR_TIE, "float32") if name in _FP32 else (NEAR_TIE_BF16, "bfloat16")
    plain, batches = PLAIN.of(dtype=dtype), [requests()]
    trees = [plain.with_bastion(24, 24, model=model) for model in (whole, small)]
    expected, *runs = compare.all([plain, *trees], batches, setup=_SETUP)
    compare.same(f"{kind}, {name}", batches, expected, runs[1], plain, near_tie, setup=_SETUP)
    steps, quantised = (run["batches"][0]["forwards"] for run in runs)
    assert quantised <= 1.1 * steps
