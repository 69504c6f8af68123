# SPDX-License-Identifier: Apache-2.0
"""Adapters on the target: each row of a trimmed step gets its own request's.

The drafter knows no adapters. Its drafts are worse for them, and no token differs.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.e2e import cases
from tests.e2e.compare import Comparison
from tests.e2e.engines import ON_GPU, TARGET, Batch, Engine, Runner
from tests.e2e.test_cuda_path import costs

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(ON_GPU, reason="engines on a CPU host")]

RANK, LAYERS = 8, 6
# Outputs and inputs of the layers that have an adapter.
SIZES = {
    "self_attn.q_proj": (192, 192),
    "self_attn.v_proj": (64, 192),
    "self_attn.o_proj": (192, 192),
    "mlp.gate_proj": (512, 192),
    "mlp.down_proj": (192, 512),
}


def make_adapter(folder: Path, seed: int, head: bool = False) -> str:
    """A random adapter of the tiny target in PEFT's format, large enough to change its texts."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    names = {
        f"model.layers.{i}.{name}": size for i in range(LAYERS) for name, size in SIZES.items()
    }
    if head:
        names["lm_head"] = 1024, 192
    weights = {}
    for name, (outputs, inputs) in names.items():
        down, up = (RANK, inputs), (outputs, RANK)
        for side, shape in (("A", down), ("B", up)):
            values = torch.randn(shape, generator=generator) * 0.1
            weights[f"base_model.model.{name}.lora_{side}.weight"] = values
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": TARGET,
        "r": RANK,
        "lora_alpha": RANK,
        "bias": "none",
        "target_modules": sorted({name.rpartition(".")[2] for name in names}),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def adapted(folder: Path, count: int, tokens: int, head: bool = False) -> Batch:
    """Requests with two adapters and without, side by side."""
    adapters = [make_adapter(folder / name, seed, head) for seed, name in enumerate("ab", 1)]
    batch = Batch("adapters side by side")
    for i, (name, text) in enumerate(cases.some(count, first=12)):
        sampling = {"temperature": 0.8, "seed": 4} if i % 4 == 3 else {"temperature": 0}
        which = i % 3
        own = {} if which == 2 else {"lora": ["ab"[which], which + 1, adapters[which]]}
        batch.add(f"lora-{name}", text, max_tokens=tokens, ignore_eos=True, **sampling, **own)
    return batch


def with_adapters(engine: Engine) -> Engine:
    """The same engine with room for two adapters, and one more.

    On a CPU, vLLM gives rows without an adapter the last one's weights, unless no row has an
    adapter. That one stays empty here.
    """
    wishes = {"enable_lora": True, "max_loras": 3, "max_lora_rank": RANK}
    return replace(engine, extra=(*engine.extra, *wishes.items()))


@pytest.mark.slow
@pytest.mark.parametrize("head", [False, True])
def test_rows_of_a_tree_get_their_requests_adapter(
    runner: Runner, compare: Comparison, tmp_path: Path, head: bool
) -> None:
    plain = with_adapters(Engine(eager=True))
    requests = [adapted(tmp_path, 3, 40, head)]
    # Trees of different sizes in one step: budgets follow from costs, given or measured.
    tree = plain.with_bastion(24, **({} if head else costs(tmp_path, "auto")))
    expected, run = runner.run(plain, requests), runner.run(tree, requests)
    compare.same(f"adapters, head {head}", requests, expected, run, plain)
    outcome = run["batches"][0]
    if not head:
        assert any(len(set(step.values())) > 1 for step in outcome["counted"])
    assert any(path != list(range(len(path))) for path in outcome["paths"])
