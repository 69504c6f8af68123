# SPDX-License-Identifier: Apache-2.0
"""fp8 KV caches in the layout of vLLM's CPU kernels, against plain decoding with such caches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e import cases
from tests.e2e.compare import Comparison, assert_winding
from tests.e2e.engines import Engine
from tests.e2e.marks import on_cpu, slow
from tests.e2e.targets import LAYERS, make_scaled

pytestmark = on_cpu("a cache in the CPU's own format")


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
_EVERY = [(kind, eager, False) for kind in _KINDS for eager in (True, False)]


@pytest.mark.parametrize(
    ("kind", "eager", "few"),
    [("fp8", True, True), slow("checkpoint", True, True), *(slow(*how) for how in _EVERY)],
)
def test_tokens_equal_plain_decoding(
    kind: str, eager: bool, few: bool, compare: Comparison, tmp_path: Path
) -> None:
    """Greedy and seeded requests, chunked prompts, prefix cache hits."""
    asked = [cases.greedy(1 if few else 2), cases.sampled(3 if few else 6)]
    asked += [cases.chunked(), *cases.prefix_cache()]
    scaled = kind == "checkpoint"
    own = {"model": make_scaled(tmp_path / "scaled")} if scaled else {"kv_cache_dtype": kind}
    plain = Engine(eager=eager, extra=own)
    how = f"{kind}, eager" if eager else kind
    lagged = plain.with_bastion(16, budget_timing="lagged").with_async()
    probed = compare.submit(lagged, asked, probe="tests.e2e.test_float8_cache:dtypes")
    expected, run = compare.oracle(f"{how}, oracle", asked, plain, plain.with_bastion(16, 16))
    assert_winding(run["batches"][0])
    compare.same(f"{how}, lagged", asked, expected, probed.result(), plain)
    if not few:
        drafted = compare.run(plain.with_bastion(16), asked)
        compare.same(f"{how}, drafter", asked, expected, drafted, plain)
    layers = probed.result()["batches"][0]["probed"]
    assert {held for _, held, *_ in layers} == {"fp8" if scaled else kind}, "the drafter's too"
    scales = {(k, v) for _, _, k, v in layers}
    assert len(scales) == (LAYERS + 1 if scaled else 1), scales
