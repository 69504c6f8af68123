# SPDX-License-Identifier: Apache-2.0
"""Replay against brute force, on synthetic recordings."""

import itertools

import numpy as np
import pytest
from synthetic_recording import synthetic_recording

from benchmarks.replay import __main__ as replay
from benchmarks.replay.costs import CostSource, from_profile, mixture_of_experts, paper_a100
from benchmarks.replay.policies import Adaptive, Beam, Chain, Fixed, Plain
from benchmarks.replay.recording import save_recording
from benchmarks.replay.simulation import Corpus, Truth, simulate
from benchmarks.replay.steps import NEVER, beam_accepted, best_first, chain_accepted, target_ranks
from benchmarks.replay.studies import budget_study
from vllm_bastion.policy.cost.paper import CurveLatency
from vllm_bastion.policy.cost.store import Profile, ProfileKey, write_profile
from vllm_bastion.policy.cost.table import StepCostTable
from vllm_bastion.policy.gains import Gains


def _lattice(rng, depth, top_k):
    q = -np.sort(-rng.dirichlet(np.ones(top_k + 1), size=depth)[:, :top_k], axis=1)
    return np.log(q)


def _all_prefixes(logprobs):
    depth, top_k = logprobs.shape
    return {
        path: sum(logprobs[d, k] for d, k in enumerate(path))
        for length in range(1, depth + 1)
        for path in itertools.product(range(top_k), repeat=length)
    }


@pytest.mark.parametrize("seed", range(25))
def test_best_first_equals_sorting_every_prefix(seed):
    rng = np.random.default_rng(seed)
    depth, top_k = int(rng.integers(1, 5)), int(rng.integers(1, 5))
    max_nodes = int(rng.integers(1, 200))
    logprobs = _lattice(rng, depth, top_k)
    ranks = rng.integers(-1, top_k, depth)
    tree = best_first(logprobs, ranks, max_nodes)
    scores = _all_prefixes(logprobs)
    best = sorted(scores.values(), reverse=True)[:max_nodes]
    np.testing.assert_allclose(tree.rho, np.exp(best), rtol=1e-5)  # of float32
    ordered = sorted(scores, key=lambda path: -scores[path])
    for d in range(depth):
        path = tuple(int(k) for k in ranks[: d + 1])
        where = ordered.index(path) + 1 if min(path) >= 0 else NEVER
        assert tree.enter[d] == (where if where <= len(tree.rho) else NEVER)


def test_a_parent_comes_before_its_child_of_equal_score():
    logprobs = np.log(np.array([[0.5, 0.3], [1.0, 0.0 + 1e-30], [1.0, 1e-30]]))
    tree = best_first(logprobs, np.array([0, 0, 0]), 10)
    assert tree.enter.tolist() == [1, 2, 3]
    assert [tree.accepted(n) for n in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize("seed", range(10))
def test_beam_and_chain_equal_a_direct_search(seed):
    rng = np.random.default_rng(seed)
    logprobs = _lattice(rng, 4, 4)
    ranks = rng.integers(-1, 3, 4)
    for width in (1, 2, 5):
        level = [()]
        accepted = 0
        for d in range(4):
            grown = [(*path, k) for path in level for k in range(4)]
            grown.sort(key=lambda path: -sum(logprobs[i, k] for i, k in enumerate(path)))
            level = grown[:width]
            if tuple(ranks[: d + 1]) not in level:
                break
            accepted += 1
        assert beam_accepted(logprobs, ranks, width) == accepted
    assert chain_accepted(logprobs, ranks) == beam_accepted(logprobs, ranks, 1)


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


def test_lagged_uses_the_size_of_the_step_before_and_this_steps_nodes(corpus, monkeypatch):
    # what was accepted is known a step later, too
    monkeypatch.setattr(Gains, "kappa_of", lambda *_: 1.0)
    table = StepCostTable.linear(10.0, 0.3, max_rows=300)
    lagged, exact = (
        Adaptive(corpus, CurveLatency(table), max_nodes=64, timing=timing, plain=False)
        for timing in ("lagged", "exact")
    )
    first = corpus.requests[0].first_step
    steps = [[first], [first + 1], [first + 2], [first + 3]]
    asked = [exact.step(step, 0.0).nodes for step in steps]
    assert [lagged.step(step, 0.0).nodes for step in steps] == [64, *asked[:3]]
    assert len(set(asked)) > 1
    # a batch that grew gets as many until its own scores arrive
    assert lagged.step([first + 4, first + 5], 0.0).nodes == asked[3]


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


def test_paper_points():
    cost = paper_a100(1100).table
    assert cost.forward_ms(1, 0)[32] == pytest.approx(22.0)
    assert cost.forward_ms(1, 0)[1024] == pytest.approx(55.9)
    assert cost.forward_ms(1, 0)[1] == pytest.approx(22.0)
    assert cost.forward_ms(1, 0)[528] == pytest.approx((22.0 + 55.9) / 2, rel=1e-6)


def test_a_recording_with_gaps_is_refused():
    recording = synthetic_recording(prompts=1, length=10)
    recording.step_positions[3] += 1
    with pytest.raises(ValueError, match="one token per step"):
        Corpus(recording, 8)


def test_command_line_writes_tables(tmp_path, capsys):
    save_recording(synthetic_recording(prompts=2, length=20), tmp_path / "r.npz")
    table = StepCostTable([(1, 0, 5.0), (64, 0, 9.0)], [(1, 1.0)], max_rows=64)
    key = ProfileKey("cpu", "t", "d", "float32", "CPU_ATTN", 1, "0.32.0")
    write_profile(Profile(key, table), tmp_path / "cpu.json")
    assert from_profile("mine", tmp_path / "cpu.json", 500).table.max_rows == 500
    arguments = [str(tmp_path / "r.npz"), "--cost", f"mine={tmp_path / 'cpu.json'}"]
    assert replay.main([*arguments, "--max-nodes", "64"]) == 0
    text = capsys.readouterr().out
    assert text.count("adaptive / oracle per domain") == 3
    for name in ("paper's A100", "mixture of experts", "mine"):
        assert f"## r, T=0, cost: {name}\n" in text


def test_a_calculated_mixture_of_experts_costs_what_its_weights_take() -> None:
    """16 requests with 7 nodes each take 1.5 times a plain step's 16 ms: nearly all experts."""
    forward = mixture_of_experts(1100).table.forward_ms(16, 0)
    assert forward[16] == pytest.approx(17.0, rel=0.05)
    assert forward[128] / forward[16] == pytest.approx(1.5, rel=0.05)
