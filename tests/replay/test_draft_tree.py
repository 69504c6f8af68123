# SPDX-License-Identifier: Apache-2.0
"""Draft trees against brute force over all prefixes, all subtrees and all outcomes.

Lemma 1 and Propositions 1 to 3 are the paper's, counted in its order: covered nodes, path-sum
surrogate, optimality of best-first expansion, unimodality of S.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from bastion_kernels import accept_path, choose_budget
from tests.draft_tree import DraftTree, best_first, chain

Prefix = tuple[int, ...]


def lattice(reqs: int, depth: int, width: int, seed: int) -> tuple[Tensor, Tensor]:
    """Candidates of a random drafter: distinct tokens, sorted log-probabilities."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(reqs, depth, 2 * width + 1, generator=generator)
    best = logits.log_softmax(-1).topk(width, dim=-1)
    return best.indices.int(), best.values


def prefix_scores(tokens: Tensor, logprobs: Tensor) -> dict[Prefix, float]:
    """rho of every prefix of one lattice `[D, K]`, by definition."""
    scores = {}
    for depth in range(1, len(tokens) + 1):
        for ranks in itertools.product(range(tokens.shape[1]), repeat=depth):
            path = tuple(int(tokens[d, rank]) for d, rank in enumerate(ranks))
            scores[path] = math.prod(logprobs[d, rank].exp() for d, rank in enumerate(ranks))
    return {path: float(score) for path, score in scores.items()}


def subtrees(tokens: Tensor, path: Prefix = ()) -> list[frozenset[Prefix]]:
    """Every prefix-closed set of prefixes below `path`, including the empty set."""
    if len(path) == len(tokens):
        return [frozenset()]
    below = []
    for token in tokens[len(path)].tolist():
        child = (*path, token)
        below.append([frozenset(), *(one | {child} for one in subtrees(tokens, child))])
    return [frozenset().union(*choice) for choice in itertools.product(*below)]


@pytest.mark.parametrize("shape", [(1, 4), (2, 3), (3, 2), (4, 1)])
def test_best_first_is_optimal_for_every_size(shape: tuple[int, int]) -> None:
    """Proposition 2: nested trees, non-increasing rho, each the best prefix-closed tree."""
    for seed in range(5):
        tokens, logprobs = lattice(1, *shape, seed)
        scores = prefix_scores(tokens[0], logprobs[0])
        best = [0.0] * (len(scores) + 1)
        for subtree in subtrees(tokens[0]):
            best[len(subtree)] = max(best[len(subtree)], sum(scores[path] for path in subtree))
        tree = best_first(tokens, logprobs, len(scores) + 2)
        tree.validate()
        paths = tree.paths()[1:]
        assert len(paths) == len(scores)
        rho = tree.log_rho[0, : len(paths)].exp().tolist()
        assert rho == pytest.approx([scores[path] for path in paths], rel=1e-5)
        assert rho == sorted(rho, reverse=True)
        surrogate = tree.surrogate()[0].tolist()
        for size in range(1, len(scores) + 1):
            assert all(path[:-1] in {(), *paths[:size]} for path in paths[:size]), "prefix-closed"
            assert surrogate[size] == pytest.approx(1 + best[size], rel=1e-5)
            smaller = best_first(tokens, logprobs, size)
            assert smaller.paths()[1:] == paths[:size], "nested"
            assert tree.prefix(size).paths()[1:] == paths[:size]


def test_random_trees_satisfy_every_invariant() -> None:
    generator = torch.Generator().manual_seed(0)
    for seed in range(1000):
        depth, width, limit = torch.randint(1, 9, (3,), generator=generator).tolist()
        tokens, logprobs = lattice(1, depth, width, seed)
        if seed % 3 == 0:
            logprobs = logprobs.round()  # ties
        best_first(tokens, logprobs, limit * limit).validate()
        chain(tokens, logprobs, limit).validate()


def self_verify(tree: DraftTree, drawn: Tensor) -> Tensor:
    """Committed lengths `[M]` when the verifier's tokens are the drafter's draws `[M, D]`."""
    draws, nodes = len(drawn), int(tree.num_nodes[0])
    depths = torch.cat([torch.zeros(1, dtype=torch.long), tree.depths[0, :nodes].long()])
    next_token = torch.cat([drawn, torch.full((draws, 1), -1)], dim=1)  # nothing after depth D
    fed = torch.cat([torch.tensor([-2]), tree.tokens[0, :nodes]])
    starts = torch.arange(draws + 1, dtype=torch.int32) * (nodes + 1)
    length = int(tree.depths.max()) + 1
    count = torch.empty(draws, dtype=torch.int32)
    accept_path(
        next_token[:, depths].flatten(),
        fed.repeat(draws),
        tree.parents,
        torch.zeros(draws, dtype=torch.int64),
        starts,
        torch.empty(draws, length, dtype=torch.int32),
        torch.empty(draws, length, dtype=torch.int64),
        count,
    )
    return count


def test_self_verification_commits_the_covered_nodes() -> None:
    """Lemma 1 draw by draw, Proposition 1 exactly (all outcomes) and by simulation."""
    depth, width, vocab = 4, 3, 5
    generator = torch.Generator().manual_seed(7)
    probs = (1.5 * torch.randn(depth, vocab, generator=generator)).softmax(-1)
    top = probs.topk(width, dim=-1)
    tokens, logprobs = top.indices.int()[None], top.values.log()[None]
    for tree in (best_first(tokens, logprobs, 20), chain(tokens, logprobs, 4)):
        paths = tree.paths()
        expected = tree.surrogate()[0, int(tree.num_nodes[0])].item()

        outcomes = torch.tensor(list(itertools.product(range(vocab), repeat=depth)))
        chance = probs[torch.arange(depth), outcomes].double().prod(1)
        committed = self_verify(tree, outcomes)
        covered = [
            sum(tuple(outcome[: len(path)]) == path for path in paths)
            for outcome in outcomes.tolist()
        ]
        assert committed.tolist() == covered
        assert (chance * committed).sum().item() == pytest.approx(expected, rel=1e-5)

        drawn = torch.stack(
            [torch.multinomial(p, 20_000, replacement=True, generator=generator) for p in probs], 1
        )
        lengths = self_verify(tree, drawn).double()
        assert abs(lengths.mean().item() - expected) < 4 * lengths.std().item() / 20_000**0.5


def test_speed_is_unimodal_for_concave_gain_and_convex_cost() -> None:
    """Proposition 3: S rises, then falls, so its first decrease follows the global maximum."""
    generator = torch.Generator().manual_seed(11)
    slots, limits = torch.zeros(1, dtype=torch.int64), torch.full((1,), 40, dtype=torch.int32)
    for seed in range(200):
        tree = best_first(*lattice(1, 6, 5, seed), 40)
        slope = 0.01 * 10 ** (3 * torch.rand((), generator=generator))
        steps = slope * torch.rand(41, generator=generator).sort().values
        cost = 5 + torch.cat([torch.zeros(1), steps]).cumsum(0)
        speed = (tree.surrogate()[0] / cost[1:].double()).tolist()
        top = max(range(41), key=lambda n: speed[n])
        rising, falling = speed[: top + 1], speed[top:]
        assert rising == sorted(rising) and falling == sorted(falling, reverse=True)
        chosen = torch.zeros(1, dtype=torch.int32)
        choose_budget(tree.log_rho, slots, limits, cost, 1, chosen)
        assert chosen.item() == top
