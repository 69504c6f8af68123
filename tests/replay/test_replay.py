# SPDX-License-Identifier: Apache-2.0
"""Replay against brute force, on synthetic recordings."""

import numpy as np
import pytest
from synthetic_recording import synthetic_recording

from benchmarks.replay.costs import CostSource
from benchmarks.replay.policies import Adaptive, Beam, Chain, Fixed, Plain
from benchmarks.replay.simulation import Corpus, Truth, simulate
from benchmarks.replay.steps import best_first, target_ranks
from benchmarks.replay.studies import budget_study
from vllm_bastion.policy.cost.paper import CurveLatency
from vllm_bastion.policy.cost.table import StepCostTable


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
    for step in (0, 17, recording.num_steps - 1):
        for d, token in enumerate(recording.continuation(step)[: recording.depth]):
            row = recording.topk_tokens[step, d].tolist()
            assert ranks[step, d] == (row.index(token) if token in row else -1)


@pytest.mark.parametrize("batch", [1, 3, 50])
def test_every_policy_emits_every_token(corpus, batch):
    table = StepCostTable.linear(10.0, 0.2, max_rows=20_000, drafter_ms=1.0)
    expected = sum(request.last for request in corpus.requests)
    policies = [
        Plain(),
        Chain(corpus),
        Beam(corpus, 4),
        Fixed(corpus, 32),
        Adaptive(corpus, CurveLatency(table)),
        Adaptive(corpus, CurveLatency(table), timing="lagged", shared=False),
    ]
    for policy in policies:
        assert simulate(corpus, policy, Truth(table), batch=batch).tokens == expected


def test_plain_decoding_takes_one_step_per_token(corpus):
    table = StepCostTable.linear(10.0, 0.2, max_rows=100, drafter_ms=5.0, aux_ms=1.0)
    result = simulate(corpus, Plain(), Truth(table))
    # 10.2 ms and the overhead, no drafter
    assert result.ms == pytest.approx(11.2 * result.tokens)
    assert result.tau == 1.0


def test_the_time_of_a_fixed_budget_equals_a_manual_sum(corpus):
    table = StepCostTable.linear(10.0, 0.5, max_rows=100, drafter_ms=2.0)
    result = simulate(corpus, Fixed(corpus, 8), Truth(table))
    assert result.ms == pytest.approx(result.steps * (10.0 + 0.5 * 9 + 2.0), rel=1e-6)
    assert sum(result.request_ms.values()) == pytest.approx(result.ms)
    assert result.mean_nodes == 8


def test_acceptance_matches_the_surrogate_for_a_calibrated_drafter(corpus):
    # the synthetic target follows the drafter, so the mean is exact (Proposition 1)
    policy = Adaptive(
        corpus, CurveLatency(StepCostTable.flat(max_rows=300)), max_nodes=64, plain=False
    )
    simulate(corpus, policy, Truth(StepCostTable.flat(max_rows=300)))
    predicted, accepted = np.array(policy.predictions).T
    spread = accepted.std() / np.sqrt(len(accepted))
    assert abs(predicted.mean() - accepted.mean()) < 4 * spread
    assert np.corrcoef(predicted, accepted)[0, 1] > 0.3


def test_adaptive_budgets_shrink_and_grow_with_the_cost(corpus):
    dear = StepCostTable.linear(0.01, 5.0, max_rows=300, drafter_ms=5.0)
    result = simulate(corpus, Adaptive(corpus, CurveLatency(dear)), Truth(dear))
    plain = simulate(corpus, Plain(), Truth(dear))
    assert result.mean_nodes < 0.2 and result.ms < 1.1 * plain.ms
    flat = StepCostTable.flat(5.0, max_rows=300)
    grown = simulate(corpus, Adaptive(corpus, CurveLatency(flat)), Truth(flat))
    assert grown.mean_nodes == 256


def test_adaptive_is_near_the_oracle_for_a_calibrated_drafter(corpus):
    source = CostSource(
        "stairs",
        StepCostTable.linear(
            10.0, 0.15, max_rows=1100, drafter_ms=2.0, captured_sizes=(1, 8, 16, 32, 64, 128, 256)
        ),
        None,
    )
    summary = budget_study(corpus, source)["summary"]
    assert summary["adaptive / oracle per domain"] > 0.97
    assert summary["adaptive / best fixed"] > 1.0
    assert summary["best-first / beam, speed"] > 1.0


def test_shared_budgets_beat_per_request_ones_in_a_batch(corpus):
    table = StepCostTable.linear(10.0, 0.2, max_rows=5000, drafter_ms=1.0)
    times = {
        shared: simulate(
            corpus,
            # without the gate, which would confuse the repeated requests
            Adaptive(corpus, CurveLatency(table), max_nodes=64, shared=shared, plain=False),
            Truth(table),
            requests=corpus.interleaved() * 4,
            batch=16,
        ).ms
        for shared in (True, False)
    }
    assert times[True] < times[False]
