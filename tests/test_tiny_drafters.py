# SPDX-License-Identifier: Apache-2.0
"""The training models of the tiny pair: transformers' target, checkpoints."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from benchmarks.tiny.drafter import Drafter, load_drafter, save_drafter
from benchmarks.tiny.heads import Domino, Markov, Selector
from benchmarks.tiny.model import Dims, Target, load_target

DIMS = Dims(
    vocab_size=64, hidden_size=48, intermediate_size=80, num_attention_heads=6,
    num_key_value_heads=2, head_dim=16,
)  # fmt: skip
IDS = torch.randint(2, 64, (120,), generator=torch.Generator().manual_seed(1))


def make_drafter(head: type[Selector | Markov] | None, causal: bool = False) -> Drafter:
    """A random drafter with bf16 values, whose head's scores are large enough to reorder tokens."""
    drafter = Drafter(replace(DIMS, num_hidden_layers=2), mask_id=1, causal=causal)
    if head is not None:
        drafter.add_module(head.name, head(DIMS, rank=8))
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


@pytest.mark.parametrize("head", [None, Selector, Markov])
@pytest.mark.parametrize("causal", [False, True])
def test_a_checkpoint_keeps_its_drafters_drafts(
    head: type[Selector | Markov] | None, causal: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    target, drafter = Target(DIMS), make_drafter(head, causal and head is None)
    save_drafter(drafter, tmp_path, target, eos_id=0)
    again = load_drafter(tmp_path)
    mine, theirs = (drafted(target, d) for d in (drafter, again))
    assert torch.equal(mine, theirs)


WORDS = torch.tensor([1, 2, 5, *range(20, 60)])


def test_a_reduced_vocabulary_drafts_the_best_of_its_own_tokens(tmp_path: Path) -> None:
    torch.manual_seed(0)
    target = Target(DIMS)
    small = Drafter(replace(DIMS, num_hidden_layers=2), 1, vocabulary=WORDS, block_size=8)
    with torch.no_grad():
        for weight in (*target.parameters(), *small.parameters()):
            weight.normal_(std=0.4).copy_(weight.bfloat16())
    save_drafter(small, tmp_path, target, eos_id=0)
    stored = load_file(tmp_path / "model.safetensors")
    assert torch.equal(stored["d2t"] + torch.arange(len(WORDS)), WORDS)
    assert torch.equal(stored["lm_head.weight"].float(), target.embed_tokens.weight[WORDS])
    again = load_drafter(tmp_path)
    anchors = torch.tensor([[20, 31]])
    _, features = target(IDS[None], features=target.feature_layers)
    states = again(target, features, IDS[anchors], anchors)
    assert states.shape == (1, 2, 7, DIMS.hidden_size)
    whole = target.logits(states).log_softmax(-1)
    others = torch.ones(DIMS.vocab_size, dtype=torch.bool)
    others[WORDS] = False
    best = whole.masked_fill(others, -torch.inf).argmax(-1)
    assert torch.equal(WORDS[again.plain_logits(target, states).argmax(-1)], best)
    assert again.indices(torch.tensor([0, 1, 3, 5, 59, 60])).tolist() == [-1, 0, -1, 2, 42, -1]


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


def test_a_domino_checkpoint_has_specforges_names(tmp_path: Path) -> None:
    torch.manual_seed(0)
    drafter, target = make_drafter(None), Target(DIMS)
    drafter.domino = Domino(DIMS, rank=8, state=12)
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.copy_(weight.bfloat16())
    save_drafter(drafter, tmp_path, target, eos_id=0)
    names = set(load_file(tmp_path / "model.safetensors"))
    head = {"prefix_gru.weight_ih_l0", "prefix_gru.weight_hh_l0"}
    assert names >= head | {"embed_proj.0.weight", "embed_proj.2.weight"}
    again, states = load_drafter(tmp_path), torch.randn(2, 5, DIMS.hidden_size)
    tokens = IDS[:10].view(2, 5)
    one, other = (d.logits(target, states, tokens) for d in (drafter, again))
    assert torch.equal(one, other) and not torch.equal(one, target.logits(states))
