# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of the drafters that benchmarks train."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.tiny.drafter import Drafter, Selector, load_drafter, save_drafter
from benchmarks.tiny.model import Dims, Target

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
