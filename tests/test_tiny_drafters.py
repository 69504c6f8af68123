# SPDX-License-Identifier: Apache-2.0
"""The training models of the tiny pair: transformers' target, checkpoints."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from benchmarks.tiny.drafter import Drafter, Selector, load_drafter, save_drafter
from benchmarks.tiny.model import Dims, Target, load_target

DIMS = Dims(
    vocab_size=64, hidden_size=48, intermediate_size=80, num_attention_heads=6,
    num_key_value_heads=2, head_dim=16,
)  # fmt: skip
IDS = torch.randint(2, 64, (120,), generator=torch.Generator().manual_seed(1))


def make_drafter(with_head: bool) -> Drafter:
    """A random drafter with bf16 values, whose head's scores are large enough to reorder tokens."""
    drafter = Drafter(replace(DIMS, num_hidden_layers=2), mask_id=1)
    if with_head:
        drafter.add_module(Selector.name, Selector(DIMS, rank=8))
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.normal_(std=0.4).copy_(weight.bfloat16())
    return drafter


def drafted(target: Target, drafter: Drafter) -> torch.Tensor:
    """Logits of all blocks of `IDS` from position 20 on: [A, D, V]."""
    anchors = torch.arange(20, 84)[None]
    _, features = target(IDS[None], features=target.feature_layers)
    states = drafter(target, features, IDS[anchors], anchors)[0]
    before = IDS[anchors[0, :, None] + torch.arange(states.shape[1])]
    return drafter.logits(target, states, before)


@pytest.mark.parametrize("with_head", [False, True])
def test_a_checkpoint_keeps_its_drafters_drafts(with_head: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    target, drafter = Target(DIMS), make_drafter(with_head)
    save_drafter(drafter, tmp_path, target, eos_id=0)
    again = load_drafter(tmp_path)
    mine, theirs = (drafted(target, d) for d in (drafter, again))
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
def test_the_target_is_transformers(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {
        name: getattr(DIMS, name) for name in Dims.__dataclass_fields__ if name != "rope_theta"
    }
    config = getattr(transformers, f"{kind}Config")(
        **sizes, rope_theta=1000.0, tie_word_embeddings=True
    )
    reference = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for weight in reference.parameters():
            weight.normal_(std=0.1).copy_(weight.bfloat16())
    reference.bfloat16().save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**written, "rope_theta": 1000.0}))
    target = load_target(tmp_path)
    layers = (1, 2, 3) if kind == "Llama" else (1, 3, 4)
    assert target.feature_layers == layers
    with torch.inference_mode():
        theirs = reference.float()(IDS[None], output_hidden_states=True)
        hidden, features = target(IDS[None], features=target.feature_layers)
        logits = target.logits(hidden)
    torch.testing.assert_close(logits, theirs.logits, rtol=1e-3, atol=1e-3)
    picked = torch.cat([theirs.hidden_states[i + 1] for i in layers], -1)
    torch.testing.assert_close(features, picked, rtol=1e-3, atol=1e-3)
