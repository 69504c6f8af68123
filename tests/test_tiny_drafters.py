# SPDX-License-Identifier: Apache-2.0
"""The tiny pair's offline evaluation: its trees equal the ops', checkpoints keep their heads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

import benchmarks.widen  # noqa: F401  (finds benchmarks/tiny)
from bastion_kernels import expand_best_first

from checkpoints import load_target  # isort: skip
from drafter import Drafter, load_drafter, save_drafter  # isort: skip
from eagle3 import Eagle3  # isort: skip
from evaluate import WIDTH, Lattice, best_first_tree, draft  # isort: skip
from heads import CANDIDATES, Domino, Markov, Selector  # isort: skip
from model import Dims, Target, rope_tables, rotate  # isort: skip
from train import drafter_loss  # isort: skip

DIMS = Dims(
    vocab_size=64,
    hidden_size=48,
    intermediate_size=80,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=16,
)
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


@pytest.mark.parametrize("head", [None, Selector, Markov])
@pytest.mark.parametrize("causal", [False, True])
def test_a_checkpoint_keeps_its_drafters_drafts(
    head: type[Selector | Markov] | None, causal: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    target, drafter = Target(DIMS), make_drafter(head, causal and head is None)
    save_drafter(drafter, tmp_path, target, eos_id=0)
    again = load_drafter(tmp_path)
    for mine, theirs in zip(*(draft(target, d, IDS, 20) for d in (drafter, again)), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("head", [Selector, Markov])
def test_offline_trees_equal_the_ops_trees(head: type[Selector | Markov]) -> None:
    torch.manual_seed(0)
    lattice = draft(Target(DIMS), make_drafter(head), IDS, 20)
    count, nodes = 3, 40
    scores = torch.full((count, *lattice.tokens.shape[1:], CANDIDATES), -torch.inf)
    part = Lattice(*(t[:count] for t in lattice))
    scores.scatter_(-1, part.order, part.logprobs)
    tokens = torch.zeros(count, nodes, dtype=torch.int64)
    parents, depths = (torch.zeros(count, nodes, dtype=torch.int32) for _ in range(2))
    log_rho = torch.zeros(count, nodes)
    expand_best_first.reference(
        part.tokens.int(), scores, WIDTH, torch.arange(count), tokens, parents, depths, log_rho,
        torch.zeros(count, dtype=torch.int32),
    )  # fmt: skip
    for row in range(count):
        grown = zip(parents[row].tolist(), depths[row].tolist(), tokens[row].tolist(), strict=True)
        mine = best_first_tree(part.block(row), nodes)
        assert [node[:3] for node in mine] == list(grown)
        assert [node[3] for node in mine] == pytest.approx(log_rho[row].exp().tolist(), rel=1e-4)


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
    drafted = draft(target, again, IDS, 20, width=4, blocks=12).tokens[[0, 11], :, 0]
    assert torch.equal(drafted, best[0])
    assert again.indices(torch.tensor([0, 1, 3, 5, 59, 60])).tolist() == [-1, 0, -1, 2, 42, -1]


@pytest.mark.parametrize("soft", [0.0, 0.5, 1.0])
def test_likeliest_tokens_give_the_loss_of_whole_distributions(soft: float) -> None:
    torch.manual_seed(0)
    target = Target(DIMS).requires_grad_(False)
    model = Drafter(replace(DIMS, num_hidden_layers=1), 1)
    ids = IDS.view(2, 60)
    with torch.no_grad():
        hidden, features = target(ids, features=target.feature_layers)
        odds, likely = target.logits(hidden).softmax(-1).topk(DIMS.vocab_size)
    rolls = {
        "ids": ids, "greedy": torch.tensor([True, False]), "first": torch.tensor([3, 9]),
        "features": features,
    }  # fmt: skip
    torch.manual_seed(1)
    whole, found = drafter_loss(model, target, rolls | {"hidden": hidden}, 3, soft)
    torch.manual_seed(1)
    kept = rolls | {"likely": likely, "odds": odds, "length": torch.tensor([60, 60])}
    some, again = drafter_loss(model, target, kept, 3, soft)
    torch.testing.assert_close(whole, some)
    assert found == again
    expected = torch.autograd.grad(whole, list(model.parameters()))
    for mine, theirs in zip(torch.autograd.grad(some, list(model.parameters())), expected):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_the_loss_is_the_mean_over_blocks_of_weighted_cross_entropies() -> None:
    torch.manual_seed(0)
    target = Target(DIMS)
    model = Drafter(replace(DIMS, num_hidden_layers=1), 1, vocabulary=WORDS, block_size=4)
    ids, length, first = IDS.view(2, 60), torch.tensor([60, 40]), torch.tensor([50, 30])
    with torch.no_grad():
        hidden, features = target(ids, features=target.feature_layers)
        odds, likely = target.logits(hidden).softmax(-1).topk(DIMS.vocab_size)
    rolls = {
        "ids": ids, "greedy": torch.tensor([True, True]), "first": first, "length": length,
        "features": features, "likely": likely, "odds": odds,
    }  # fmt: skip
    torch.manual_seed(1)
    loss, found = drafter_loss(model, target, rolls, 5, 0.0, decay=2.0)
    torch.manual_seed(1)
    room = (length - 3 - first)[:, None]
    anchors = first[:, None] + (torch.rand(2, 5) * room).long()
    assert (anchors + 3 < length[:, None]).all() and (anchors >= first[:, None]).all()
    with torch.inference_mode():
        states = model(target, features, ids.gather(1, anchors), anchors)
        every = target.logits(states)
    weights = torch.exp(-torch.arange(3) / 2.0)
    total, hits, accepted = 0.0, 0, 0
    for row in range(2):
        for block in range(5):
            going = True
            for depth in range(3):
                token = int(ids[row, anchors[row, block] + 1 + depth])
                log_q = every[row, block, depth, WORDS].log_softmax(-1)
                if token in WORDS:
                    place = WORDS.tolist().index(token)
                    total -= float(weights[depth] * log_q[place])
                going = going and int(WORDS[log_q.argmax()]) == token
                hits += going and depth == 0
                accepted += going
    assert loss.item() == pytest.approx(total / 10 / float(weights.sum()), rel=1e-5)
    assert float(found["hit"]) == pytest.approx(hits / 10)
    assert float(found["accepted"]) == pytest.approx(accepted / 10)


def test_a_llama_target_is_transformers_llama(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {
        name: getattr(DIMS, name) for name in Dims.__dataclass_fields__ if name != "rope_theta"
    }
    config = LlamaConfig(**sizes, rope_theta=1000.0, tie_word_embeddings=True)
    reference = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for weight in reference.parameters():
            weight.normal_(std=0.1).copy_(weight.bfloat16())
    reference.bfloat16().save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**written, "rope_theta": 1000.0}))
    target = load_target(tmp_path)
    assert target.feature_layers == (1, 2, 3)
    with torch.inference_mode():
        theirs = reference.float()(IDS[None], output_hidden_states=True)
        hidden, features = target(IDS[None], features=target.feature_layers)
        logits = target.logits(hidden)
    torch.testing.assert_close(logits, theirs.logits, rtol=1e-3, atol=1e-3)
    picked = torch.cat([theirs.hidden_states[i + 1] for i in (1, 2, 3)], -1)
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


def test_eagle3_is_trained_on_the_passes_that_drafting_makes() -> None:
    torch.manual_seed(0)
    target = Target(DIMS)
    head = Eagle3(target)
    length, depth = 12, 4
    embeds = target.embed_tokens(IDS[1 : length + 1])[None]
    _, features = target(IDS[None, :length], features=target.feature_layers)
    passes = head(embeds, features, depth)
    for start in (0, 5, length - depth):
        for k, logits in enumerate(drafted(head, embeds, features, start, depth)):
            assert torch.allclose(passes[k][0, start], logits, atol=1e-5), (start, k)


def drafted(
    head: Eagle3, embeds: torch.Tensor, features: torch.Tensor, start: int, depth: int
) -> list[torch.Tensor]:
    """The logits of a draft from `start`, one row after another with one causal sequence."""
    layer, attn = head.midlayer, head.midlayer.self_attn
    states = head.fc(features[:, : start + 1])
    out = []
    for _ in range(depth):
        rows = states.shape[1]
        x = torch.cat([layer.input_layernorm(embeds[:, :rows]), layer.hidden_norm(states)], -1)
        cos, sin = (table[None, None] for table in rope_tables(DIMS, torch.arange(rows)))
        q, k = (rotate(attn.heads(part(x)), cos, sin) for part in (attn.q_proj, attn.k_proj))
        mixed = attn.attend(q, k, attn.heads(attn.v_proj(x)), None, causal=True)
        last = (states + mixed)[:, -1:]
        last = last + layer.mlp(layer.post_attention_layernorm(last))
        out.append(head.lm_head(head.norm(last))[0, 0])
        states = torch.cat([states, last], dim=1)
    return out
