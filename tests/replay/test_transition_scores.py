# SPDX-License-Identifier: Apache-2.0
"""Replay of transition scores: against brute force over all prefixes, and the engine's own op."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from synthetic_recording import synthetic_recording

from benchmarks.replay.costs import paper_a100
from benchmarks.replay.policies import Adaptive, Beam, Chain, Fixed
from benchmarks.replay.recording import Recording
from benchmarks.replay.simulation import Corpus, Truth, simulate
from benchmarks.replay.steps import NEVER, beam_accepted, best_first
from tests.draft_tree import grown
from vllm_bastion.policy.cost.table import StepCostTable


def rows_of(rng, *shape):
    """Random unsorted log-probabilities over the last axis."""
    scores = 2 * rng.normal(size=shape)
    return scores - np.log(np.exp(scores).sum(-1, keepdims=True))


def all_prefixes(logprobs):
    """Log path score of every prefix, by definition."""
    depth, width = logprobs.shape[:2]
    return {
        path: sum(logprobs[d, path[d - 1] if d else 0, k] for d, k in enumerate(path))
        for length in range(1, depth + 1)
        for path in itertools.product(range(width), repeat=length)
    }


@pytest.mark.parametrize("seed", range(25))
def test_best_first_equals_sorting_every_prefix(seed):
    rng = np.random.default_rng(seed)
    depth, width = rng.integers(1, 5, 2).tolist()
    max_nodes = int(rng.integers(1, 200))
    logprobs = rows_of(rng, depth, width, width)
    ranks = rng.integers(-1, width, depth)
    tree = best_first(logprobs, ranks, max_nodes)
    scores = all_prefixes(logprobs)
    ordered = sorted(scores, key=lambda path: -scores[path])
    best = [scores[path] for path in ordered[:max_nodes]]
    np.testing.assert_allclose(tree.rho, np.exp(best), rtol=1e-5)  # of float32
    for d in range(depth):
        path = tuple(ranks[: d + 1].tolist())
        where = ordered.index(path) + 1 if min(path) >= 0 else NEVER
        assert tree.enter[d] == (where if where <= len(tree.rho) else NEVER)


@pytest.mark.parametrize("seed", range(15))
def test_beam_and_chain_equal_a_direct_search(seed):
    rng = np.random.default_rng(seed)
    logprobs = rows_of(rng, 4, 4, 4)
    scores = all_prefixes(logprobs)
    accepted, chain = {}, ()
    for _ in range(4):
        chain = max(((*chain, k) for k in range(4)), key=scores.__getitem__)
    # Near the chain, so that some tokens are accepted.
    ranks = np.where(rng.random(4) < 0.7, chain, rng.integers(-1, 4, 4))
    for width in (1, 2, 5):
        level, accepted[width] = [()], 0
        for d in range(4):
            level = [(*path, k) for path in level for k in range(4)]
            level = sorted(level, key=lambda path: -scores[path])[:width]
            if tuple(ranks[: d + 1].tolist()) not in level:
                break
            accepted[width] += 1
        assert beam_accepted(logprobs, ranks, width) == accepted[width]
    wrong = np.flatnonzero(ranks != chain)
    assert accepted[1] == (wrong[0] if len(wrong) else 4), "a beam of width 1 is the chain"


@pytest.mark.parametrize("seed", range(10))
def test_equal_rows_are_the_unary_tree(seed):
    rng = np.random.default_rng(seed)
    logprobs = -np.sort(-rows_of(rng, 5, 4), axis=1)
    ranks = rng.integers(-1, 3, 5)
    rows = np.repeat(logprobs[:, None], 4, axis=1)
    ours, unary = best_first(rows, ranks, 60), best_first(logprobs, ranks, 60)
    np.testing.assert_allclose(ours.rho, unary.rho, rtol=1e-12)
    assert ours.enter.tolist() == unary.enter.tolist()
    for width in (1, 3):
        assert beam_accepted(rows, ranks, width) == beam_accepted(logprobs, ranks, width)


def recorded() -> Recording:
    """The synthetic recording with scores that favour the target's token half of the time."""
    recording = synthetic_recording(prompts=3, length=30)
    rng = np.random.default_rng(1)
    steps, depth, width = recording.topk_tokens.shape
    ranks = Corpus(recording, 1).ranks
    knows = rng.random((steps, depth, 1, 1)) < 0.5
    scores = rng.normal(size=(steps, depth, width, width)) + recording.topk_logprobs[:, :, None]
    scores += 6.0 * knows * (np.arange(width) == ranks[:, :, None, None])
    logprobs = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    return replace(recording, transitions=logprobs.astype(np.float16))


@pytest.fixture(scope="module")
def corpora() -> tuple[Corpus, Corpus]:
    """Corpora of transition scores, and of the same candidates' unary scores."""
    recording = recorded()
    return Corpus(recording, 128), Corpus(replace(recording, transitions=None), 128)


def test_scores_and_chain_are_the_engines_ops(corpora):
    corpus, _ = corpora
    recording = corpus.recording
    for step in range(0, recording.num_steps, 11):
        one = slice(step, step + 1)
        tokens = torch.from_numpy(recording.topk_tokens[one].astype(np.int32))
        scores = torch.from_numpy(recording.scores[one].astype(np.float32))
        theirs = grown(tokens, scores, 128)
        ours = corpus.tree(step)
        np.testing.assert_allclose(ours.rho, theirs.log_rho[0].exp(), rtol=1e-5)
        # The first n nodes contain as much of the target's path as replay says.
        truth = tuple(recording.continuation(step)[: recording.depth].tolist())
        for n in (3, 20, 128):
            paths = set(theirs.paths()[: n + 1])
            inside = [truth[: d + 1] in paths for d in range(recording.depth)]
            assert ours.accepted(n) == sum(inside)
        chain = grown(tokens, scores, recording.depth, top_k=1).paths()[-1]
        equal = np.cumprod(np.equal(chain, truth)).sum()
        assert beam_accepted(corpus.scores(step), corpus.ranks[step], 1) == equal


def test_policies_use_the_scores_of_their_corpus(corpora):
    cost = Truth(StepCostTable.linear(10.0, 0.2, max_rows=300))
    source = paper_a100(300)
    for policy in (Chain, lambda c: Beam(c, 4), lambda c: Fixed(c, 32)):
        by_transition, by_unary = (simulate(c, policy(c), cost) for c in corpora)
        assert by_transition.tokens == by_unary.tokens, "the scores must not change the tokens"
        assert by_transition.tau > by_unary.tau
    policy = Adaptive(corpora[0], source.latency("table"))
    assert simulate(corpora[0], policy, cost).tokens == by_unary.tokens
