# SPDX-License-Identifier: Apache-2.0
"""fp8 KV caches in the layout of vLLM's CPU kernels, against plain decoding with such caches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e import cases
from tests.e2e.compare import Comparison, answers, leaving_the_chain
from tests.e2e.engines import ON_GPU, Batch, Engine, Runner
from tests.e2e.targets import LAYERS, make_scaled

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(ON_GPU, reason="a cache in the CPU's own format"),
]


def dtypes(session: Any) -> list[list[str]]:
    """Probe: dtype and scales of every layer's cache, including the drafter's."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention import Attention

    layers = get_layers_from_vllm_config(session.runner.vllm_config, Attention)
    return [
        [name, layer.kv_cache_dtype, str(layer._k_scale_float), str(layer._v_scale_float)]
        for name, layer in layers.items()
    ]


def batches(few: bool) -> list[Batch]:
    """Greedy and seeded requests, chunked prompts, prefix cache hits."""
    free = [cases.greedy(1), cases.sampled(3)] if few else [cases.greedy(2), cases.sampled(6)]
    return [*free, cases.chunked(), *cases.prefix_cache()]


@pytest.mark.parametrize(
    ("kind", "eager", "few"),
    [
        ("fp8", True, True),
        ("checkpoint", True, True),
        *(
            pytest.param(kind, eager, False, marks=pytest.mark.slow)
            for kind, eager in (
                ("fp8", True),
                ("checkpoint", True),
                ("fp8", False),
                ("checkpoint", False),
                ("fp8_e5m2", True),
                ("fp8_e5m2", False),
            )
        ),
    ],
)
def test_tokens_equal_plain_decoding(
    kind: str, eager: bool, few: bool, runner: Runner, compare: Comparison, tmp_path: Path
) -> None:
    asked = batches(few)
    if kind == "checkpoint":
        plain = Engine(eager=eager, extra=(("model", make_scaled(tmp_path / "scaled")),))
    else:
        plain = Engine(eager=eager, extra=(("kv_cache_dtype", kind),))
    expected = runner.run(plain, asked)
    known = {"answers": answers(expected)}
    probe = "tests.e2e.test_float8_cache:dtypes"
    lagged = plain.with_bastion(16, budget_timing="lagged").with_async()
    runs = {
        "oracle": runner.submit(plain.with_bastion(16, 16), asked, oracle=known),
        "lagged": runner.submit(lagged, asked, probe=probe),
    }
    if not few:
        runs["drafter"] = runner.submit(plain.with_bastion(16), asked)
    for name, run in runs.items():
        how = f"{kind}, {name}, eager" if eager else f"{kind}, {name}"
        compare.same(how, asked, expected, run.result(), plain)
    paths = runs["oracle"].result()["batches"][0]["paths"]
    assert leaving_the_chain(paths)
    assert max(map(len, paths)) > 4
    layers = runs["lagged"].result()["batches"][0]["probed"]
    kinds = {held for _, held, *_ in layers}
    assert kinds == {"fp8" if kind == "checkpoint" else kind}, "the drafter's are of the same"
    scales = {(k, v) for _, _, k, v in layers}
    assert len(scales) == (LAYERS + 1 if kind == "checkpoint" else 1), scales
