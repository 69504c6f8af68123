# SPDX-License-Identifier: Apache-2.0
"""The paper's path-sum surrogate against brute force over all outcomes.

If the drafter verified itself, a tree would commit as many tokens as it has nodes on the drawn path
(Lemma 1), in expectation 1 + the sum of rho over its nodes (Proposition 1).
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from bastion_kernels import accept_path
from tests.draft_tree import DraftTree, grown


def self_verify(tree: DraftTree, drawn: Tensor) -> Tensor:
    """Committed lengths `[M]` when the verifier's tokens are the drafter's draws `[M, D]`."""
    draws, rows = len(drawn), 1 + tree.tokens.shape[1]
    depths = torch.cat([torch.zeros(1, dtype=torch.long), tree.depths[0].long()])
    next_token = torch.cat([drawn, torch.full((draws, 1), -1)], dim=1)  # nothing after depth D
    fed = torch.cat([torch.tensor([-2]), tree.tokens[0]]).repeat(draws)
    length, count = int(depths.max()) + 1, torch.empty(draws, dtype=torch.int32)
    path = torch.empty(draws, length, dtype=torch.int32)
    accept_path(
        next_token[:, depths].flatten(), fed, tree.parents, torch.zeros(draws, dtype=torch.int64),
        torch.arange(0, draws * rows + 1, rows, dtype=torch.int32), path, path.long(), count,
    )  # fmt: skip
    return count


def test_self_verification_commits_the_covered_nodes() -> None:
    depth, width, vocab = 4, 3, 5
    generator = torch.Generator().manual_seed(7)
    probs = (1.5 * torch.randn(depth, vocab, generator=generator)).softmax(-1)
    top = probs.topk(width, dim=-1)
    tokens, logprobs = top.indices.int()[None], top.values.log()[None]
    outcomes = torch.tensor(list(itertools.product(range(vocab), repeat=depth)))
    chance = probs[torch.arange(depth), outcomes].double().prod(1)
    for tree in (grown(tokens, logprobs, 20), grown(tokens, logprobs, 4, top_k=1)):
        paths = tree.paths()
        committed = self_verify(tree, outcomes)
        assert committed.tolist() == [
            sum(tuple(outcome[: len(path)]) == path for path in paths)
            for outcome in outcomes.tolist()
        ]
        expected = 1 + float(tree.log_rho.double().exp().sum())
        assert float((chance * committed).sum()) == pytest.approx(expected, rel=1e-5)
