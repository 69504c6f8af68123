# SPDX-License-Identifier: Apache-2.0
"""fp8 KV caches in the layout of vLLM's CPU kernels, against plain decoding with such caches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e import cases
from tests.e2e.compare import Comparison, assert_winding
from tests.e2e.engines import Engine
from tests.e2e.marks import on_cpu, slow
from tests.e2e.targets import LAYERS, make_scaled

_AVX512 = pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="vLLM needs AVX-512")
pytestmark = on_cpu("a cache in the CPU's own format", _AVX512)


def dtypes(session: Any) -> list[list[str]]:
    """Probe: dtype and scales of every layer's cache, including the drafter's."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention import Attention

    layers = get_layers_from_vllm_config(session.runner.vllm_config, Attention)
    return [
        [name, layer.kv_cache_dtype, str(layer._k_scale_float), str(layer._v_scale_float)]
        for name, layer in layers.items()
    ]


_KINDS = ("fp8", "checkpoint", "fp8_e5m2")


@pytest.mark.parametrize("eager", [True, slow(False)], ids=["eager", "compiled"])
@pytest.mark.parametrize("kind", ["fp8", *map(slow, _KINDS[1:])])
def test_tokens_equal_plain_decoding(
    kind: str, eager: bool, compare: Comparison, tmp_path: Path
) -> None:
    """Greedy and seeded requests, chunked prompts, prefix cache hits."""
    plain, how = _engine(kind, eager, tmp_path), f"{kind}, {'eager' if eager else 'compiled'}"
    asked = [cases.greedy(1), cases.sampled(3), cases.chunked(), *cases.prefix_cache()]
    tree, probe = plain.with_bastion(16, 16), "tests.e2e.test_float8_cache:dtypes"
    _, run = compare.oracle(f"{how}, oracle", asked, plain, tree, probe=probe)
    assert_winding(run["batches"][0])
    layers, scaled = run["batches"][0]["probed"], kind == "checkpoint"
    assert {held for _, held, *_ in layers} == {"fp8" if scaled else kind}, "the drafter's too"
    scales = {(k, v) for _, _, k, v in layers}
    assert len(scales) == (LAYERS + 1 if scaled else 1), scales


@pytest.mark.slow
@pytest.mark.parametrize("kind", _KINDS)
def test_more_tokens_with_the_drafter(kind: str, compare: Comparison, tmp_path: Path) -> None:
    plain, asked = _engine(kind, True, tmp_path), [cases.greedy(2), cases.sampled(6)]
    expected = compare.run(plain, asked)
    lagged = plain.with_bastion(16, budget_timing="lagged").with_async()
    for tree in (plain.with_bastion(16), lagged):
        label = f"{kind}, {'lagged' if tree is lagged else 'drafter'}"
        compare.same(label, asked, expected, compare.run(tree, asked), plain)


def _engine(kind: str, eager: bool, folder: Path) -> Engine:
    """Plain decoding with caches of this kind; a checkpoint may bring their scales."""
    if kind == "checkpoint":
        return Engine(eager=eager).of(model=make_scaled(folder / "scaled"))
    return Engine(eager=eager).of(kv_cache_dtype=kind)
