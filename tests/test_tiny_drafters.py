# SPDX-License-Identifier: Apache-2.0
"""The tiny pair's offline evaluation: its trees equal the ops', checkpoints keep their heads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import benchmarks.widen  # noqa: F401  (finds benchmarks/tiny)
from bastion_kernels import expand_best_first

from drafter import Drafter, load_drafter, save_drafter  # isort: skip
from eagle3 import Eagle3  # isort: skip
from evaluate import WIDTH, Lattice, best_first_tree, draft  # isort: skip
from heads import CANDIDATES, Domino, Markov, Selector  # isort: skip
from model import Dims, Target, rope_tables, rotate  # isort: skip

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
