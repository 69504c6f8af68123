# SPDX-License-Identifier: Apache-2.0
"""A Domino drafter's chains against SpecForge's own code, recorded by `specforge_chains.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bastion_kernels import PrefixHead, PrefixLattice, expand_best_first, recurrent_lattice
from benchmarks import TINY
from benchmarks.tiny.drafter import load_drafter
from benchmarks.tiny.model import load_target
from tests.drafters.recording import CANDIDATES, specforge_chains
from tests.e2e.engines import GAMMA


def test_the_kernels_chains_are_specforges() -> None:
    target, drafter = load_target(TINY / "target"), load_drafter(TINY / "domino")
    distinct, beyond = set(), 0
    for row in specforge_chains():
        ids, start = torch.tensor([*row["prompt"], *row["tokens"]]), len(row["prompt"])
        anchors = torch.arange(start, start + len(row["chains"]))
        for mine, theirs in zip(chains(target, drafter, ids, anchors), row["chains"], strict=True):
            if theirs is None:
                beyond += 1
                continue
            assert mine.tolist() == theirs, row["id"]
            distinct.add(tuple(theirs))
    assert len(distinct) > 100 and beyond <= 2


@torch.inference_mode()
def chains(target: Any, drafter: Any, ids: Tensor, anchors: Tensor) -> Tensor:
    """[A, D] tokens of trees of width 1, by the ops that the engine uses."""
    gru, project = drafter.head.prefix_gru, drafter.head.embed_proj
    head = PrefixHead(gru.weight_ih_l0, gru.weight_hh_l0, project[0].weight, project[2].weight)
    blocks = len(anchors)
    _, features = target(ids[None], features=target.feature_layers)
    states = drafter(target, features, ids[anchors][None], anchors[None])[0]
    base, tokens = target.logits(states).topk(CANDIDATES, dim=-1)
    lattice = PrefixLattice.empty(blocks, GAMMA, 1, CANDIDATES, ids.device)
    recurrent_lattice(
        head, head.prepared(), target.embed_tokens, ids[anchors], tokens.int(), tokens, base,
        states, 1, lattice,
    )  # fmt: skip
    out = torch.zeros(blocks, GAMMA, dtype=torch.int64)
    parents, depths = (torch.zeros(blocks, GAMMA, dtype=torch.int32) for _ in range(2))
    scores, sizes = torch.zeros(blocks, GAMMA), torch.zeros(blocks, dtype=torch.int32)
    expand_best_first(
        tokens.int(), lattice.logprobs, 1, torch.arange(blocks), out, parents, depths, scores,
        sizes, lattice.rows,
    )  # fmt: skip
    assert (sizes == GAMMA).all()
    return out
