# SPDX-License-Identifier: Apache-2.0
"""Replay of the policies, and of the product's trees and controller, over recordings."""

import numpy as np
import pytest
from synthetic_recording import synthetic_recording

from benchmarks import RESULTS
from benchmarks.replay.costs import CostSource, from_profile, numbers_of, paper_a100, table_of
from benchmarks.replay.lookup import NODES, Engine
from benchmarks.replay.policies import Adaptive, Beam, Chain, Fixed, Plain
from benchmarks.replay.recording import Drafted, Emitted, load_recording, recording_of
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
    policies = [Plain(), Chain(corpus), Beam(corpus, 4), Fixed(corpus, 32)]
    policies.append(Adaptive(corpus, CurveLatency(table)))
    policies.append(Adaptive(corpus, CurveLatency(table), lagged=True, shared=False))
    for policy in policies:
        assert simulate(corpus, policy, Truth(table), batch=batch).tokens == expected


def test_times_are_the_sums_of_the_steps(corpus):
    table = StepCostTable.linear(10.0, 0.2, max_rows=100, drafter_ms=5.0, aux_ms=1.0)
    plain = simulate(corpus, Plain(), Truth(table))
    # 10.2 ms and the overhead, no drafter
    assert plain.ms == pytest.approx(11.2 * plain.tokens) and plain.tau == 1.0
    fixed = simulate(corpus, Fixed(corpus, 8), Truth(table))
    assert fixed.ms == pytest.approx(fixed.steps * (10.0 + 0.2 * 9 + 6.0), rel=1e-6)
    assert sum(part.ms for part in fixed.parts.values()) == pytest.approx(fixed.ms)
    assert fixed.mean_nodes == 8


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
    sizes = (1, 8, 16, 32, 64, 128, 256)
    table = StepCostTable.linear(10.0, 0.15, max_rows=1100, drafter_ms=2.0, captured_sizes=sizes)
    source = CostSource("stairs", table, None)
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


# --- with copies of the context ----------------------------------------------------------------

SOURCE = paper_a100(2048)


def run(corpus, policy, batch=1, source=SOURCE):
    return simulate(corpus, policy, Truth(source.table), batch=batch)


def engine(corpus, source=SOURCE, **options):
    return Engine(corpus, source.latency("ema_table"), name="engine", **options)


def repeating(period, length=60, depth=7, top_k=4):
    """Replies that repeat their prompt for ever, and drafts that are always wrong."""
    rng = np.random.default_rng(0)
    requests, drafts = [], []
    for i in range(4):
        words = rng.permutation(400)[:period]
        text = np.resize(words, 2 * period + length + depth + 1)
        requests.append(Emitted(f"{i}", "copies", 0.0, text[: 2 * period], text[2 * period :]))
        q = np.log(np.full((depth, top_k), 1 / 8))
        for position in range(1, length):
            drafts.append(Drafted(f"{i}", position, np.full((depth, top_k), 450), q))
    return Corpus(recording_of({}, requests, drafts), NODES)


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("nodes", [16, NODES])
def test_without_lookup_a_fixed_budget_is_the_one_of_the_policies(nodes, batch):
    corpus = Corpus(synthetic_recording(), NODES)
    ours = run(corpus, engine(corpus, lookup=False, budget=nodes), batch)
    theirs = run(corpus, Fixed(corpus, nodes), batch)
    assert (ours.tokens, ours.steps, ours.nodes) == (theirs.tokens, theirs.steps, theirs.nodes)
    assert ours.ms == pytest.approx(theirs.ms)


def test_without_lookup_the_controller_decides_as_the_policies_do():
    corpus = Corpus(synthetic_recording(prompts=12), NODES)
    ours = run(corpus, engine(corpus, lookup=False))
    theirs = run(corpus, Adaptive(corpus, SOURCE.latency("ema_table")))
    assert ours.ms == pytest.approx(theirs.ms, rel=0.02)


def test_copies_are_accepted_to_their_end_where_a_text_repeats():
    corpus = repeating(period=20)
    # The first steps learn how far copies can be trusted.
    assert run(corpus, engine(corpus)).tau > 8
    assert run(corpus, engine(corpus, lookup=False)).tau == 1.0
    # A lattice that is always wrong costs no accepted token.
    fixed = run(corpus, engine(corpus, budget=NODES))
    assert fixed.tau > 8


def test_copies_alone_need_no_drafter():
    corpus = repeating(period=20)
    plain = run(corpus, Plain())
    alone = run(corpus, engine(corpus, drafter=False))
    assert plain.ms / alone.ms > 5


def test_nothing_is_lost_where_nothing_repeats():
    corpus = Corpus(synthetic_recording(prompts=12), NODES)
    without, lookup = (run(corpus, engine(corpus, lookup=on)) for on in (False, True))
    assert lookup.ms < 1.02 * without.ms


# --- the costs of an H100 -----------------------------------------------------------------------

MOST, LARGEST_GRAPH = 255, 512
# of a forward pass without a graph, by the host's launches (docs/numbers.md)
HOST_MS = 16.0


@pytest.fixture(scope="module")
def recorded():
    return Corpus(load_recording(RESULTS / "recordings" / "tiny.npz"), MOST, 0.0)


@pytest.mark.parametrize("batch, budgets", [(4, (16, 32, 64)), (15, (8, 16, 32))])
def test_lagged_budgets_keep_up_with_the_best_fixed_one(recorded, batch, budgets):
    """The profile does not know what steps beyond the graphs really take, and batches grow."""
    source = from_profile("H100", RESULTS / "gpu" / "4B-h100-profile.json", 16 * (MOST + 1))
    data = numbers_of(source.table)
    data["samples"] = [
        (LARGEST_GRAPH + 1, context, HOST_MS, reqs) if rows == 576
        else (rows, context, max(ms, HOST_MS) if rows > LARGEST_GRAPH else ms, reqs)
        for rows, context, ms, reqs in data["samples"]
    ]  # fmt: skip
    really = table_of(data, source.table.max_rows, source.calibrated)
    requests = recorded.interleaved() * (batch // 4)

    def seconds(policy):
        truth = Truth(really, noise=0.05, stalls=0.01)
        return simulate(recorded, policy, truth, requests=requests, batch=batch).ms / 1e3

    latency = source.latency("ema_table")
    adaptive = seconds(Adaptive(recorded, latency, max_nodes=MOST, lagged=True))
    fixed = min(seconds(Fixed(recorded, nodes)) for nodes in budgets)
    assert adaptive <= fixed / 0.99 and adaptive < 0.4 * seconds(Plain())
