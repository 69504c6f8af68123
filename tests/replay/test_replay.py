# SPDX-License-Identifier: Apache-2.0
"""Replay of the policies and of the product's controller over recordings."""

import numpy as np
import pytest
from synthetic_recording import synthetic_recording

from benchmarks.replay.costs import Costs, paper_a100
from benchmarks.replay.policies import Fixed, Gated, Plain
from benchmarks.replay.simulation import Corpus, Truth, simulate
from benchmarks.replay.studies import STUDIES, shares_of_best
from benchmarks.replay.trees import best_first, target_ranks


def test_a_parent_comes_before_its_child_of_equal_score():
    logprobs = np.log(np.array([[0.5, 0.3], [1.0, 0.0 + 1e-30], [1.0, 1e-30]]))
    tree = best_first(logprobs, np.array([0, 0, 0]), 10)
    assert tree.enter.tolist() == [1, 2, 3]
    assert [tree.accepted(n) for n in range(4)] == [0, 1, 2, 3]


@pytest.fixture(scope="module")
def corpus():
    return Corpus(synthetic_recording(), 256)


def test_ranks_come_from_the_continuation(corpus):
    recording = corpus.recording
    ranks = target_ranks(recording)
    for step in (0, 17, len(recording.step_requests) - 1):
        request, position = recording.step_requests[step], recording.step_positions[step]
        after = recording.tokens[recording.token_offsets[request] + position :]
        for d, token in enumerate(after[: recording.depth]):
            row = recording.topk_tokens[step, d].tolist()
            assert ranks[step, d] == (row.index(token) if token in row else -1)


def linear(base_ms, per_row_ms, max_rows, drafter_ms=0.0, aux_ms=0.0, captured_sizes=()):
    """A forward pass of n rows costs `base_ms + per_row_ms * n`."""
    points = [(n, base_ms + per_row_ms * n) for n in {1, max_rows, *captured_sizes}]
    more = {"aux_ms": aux_ms, "plain_aux_ms": aux_ms, "captured_sizes": captured_sizes}
    return Costs(points, [(1, drafter_ms)], max_rows=max_rows, **more)


@pytest.mark.parametrize("batch", [1, 3, 50])
def test_every_policy_emits_every_token(corpus, batch):
    table = linear(10.0, 0.2, 20_000, drafter_ms=1.0)
    expected = sum(request.last for request in corpus.requests)
    policies = [Plain(), Fixed(corpus, 32)]
    policies.append(Gated(corpus, table))
    policies.append(Gated(corpus, table, lagged=True))
    for policy in policies:
        assert simulate(corpus, policy, Truth(table), batch=batch).tokens == expected


def test_times_are_the_sums_of_the_steps(corpus):
    table = linear(10.0, 0.2, 100, drafter_ms=5.0, aux_ms=1.0)
    plain = simulate(corpus, Plain(), Truth(table))
    # 10.2 ms and the overhead, no drafter
    assert plain.ms == pytest.approx(11.2 * plain.tokens) and plain.steps == plain.tokens
    fixed = simulate(corpus, Fixed(corpus, 8), Truth(table))
    assert fixed.ms == pytest.approx(fixed.steps * (10.0 + 0.2 * 9 + 6.0), rel=1e-6)
    assert fixed.nodes == 8 * fixed.steps


def test_acceptance_matches_the_surrogate_for_a_calibrated_drafter(corpus):
    # the synthetic target follows the drafter, so the mean is exact (Proposition 1)
    trees = [corpus.tree(step) for step in range(len(corpus.recording.step_requests))]
    predicted = np.array([tree.rho[:64].sum() for tree in trees])
    accepted = np.array([tree.accepted(64) for tree in trees])
    spread = accepted.std() / np.sqrt(len(accepted))
    assert abs(predicted.mean() - accepted.mean()) < 4 * spread
    assert np.corrcoef(predicted, accepted)[0, 1] > 0.3


def test_adaptive_budgets_shrink_and_grow_with_the_cost(corpus):
    dear = linear(0.01, 5.0, 300, drafter_ms=5.0)
    result = simulate(corpus, Gated(corpus, dear), Truth(dear))
    plain = simulate(corpus, Plain(), Truth(dear))
    assert result.nodes < 0.2 * result.request_steps and result.ms < 1.1 * plain.ms
    flat = linear(5.0, 0.0, 300)
    grown = simulate(corpus, Gated(corpus, flat), Truth(flat))
    assert grown.nodes > 0.95 * 255 * grown.request_steps


def test_adaptive_is_near_the_best_fixed_budget_of_each_domain(corpus):
    sizes = (1, 8, 16, 32, 64, 128, 256)
    table = linear(10.0, 0.15, 1100, drafter_ms=2.0, captured_sizes=sizes)
    for requests in corpus.domains.values():
        policies = [Gated(corpus, table), *(Fixed(corpus, n) for n in sizes[1:])]
        ours, *fixed = (simulate(corpus, p, Truth(table), requests=requests).ms for p in policies)
        assert ours < 1.05 * min(fixed)


def test_the_gate_is_near_the_best_choice_whatever_steps_really_cost(corpus):
    shares = [row["exact"] for row in shares_of_best("costs off", corpus, paper_a100(2048))]
    assert len(shares) == 15 and min(shares) > 0.85 and np.mean(shares) > 0.95


def test_a_study_takes_any_policy(corpus):
    """Plain decoding has its share, and a change of costs is judged by each half's best choice."""
    makers = {"plain": lambda corpus, costs: Plain()}
    for study in STUDIES:
        for row in shares_of_best(study, corpus, paper_a100(2048), makers):
            best = max(1.0, row["fixed / plain"])
            assert row["plain"] <= 1 / best + 1e-9, "no choice is better than the best one"
            if study == "costs off":
                assert row["plain"] == pytest.approx(1 / best)
