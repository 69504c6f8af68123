# SPDX-License-Identifier: Apache-2.0
"""The budget of a batch against exhaustive search and the paper's Algorithm 1."""

import itertools

import numpy as np
import pytest

from benchmarks.replay.controller import choose_budget
from benchmarks.replay.recording import load_recording
from benchmarks.replay.steps import best_first, target_ranks
from helpers import ROOT

RECORDING = ROOT / "benchmarks" / "results" / "recordings" / "tiny.npz"


def _scores(rng, reqs, columns):
    return -np.sort(-rng.random((reqs, columns)), axis=1)


def _exhaustive(rho, limits, cost, base_rows):
    """Every combination of per-request counts."""
    best = (-1.0, None)
    for counts in itertools.product(*(range(limit + 1) for limit in limits)):
        if base_rows + sum(counts) >= len(cost):
            continue
        tokens = len(rho) + sum(rho[r][:n].sum() for r, n in enumerate(counts))
        best = max(best, (tokens / cost[base_rows + sum(counts)], counts), key=lambda item: item[0])
    return best


@pytest.mark.parametrize("seed", range(20))
def test_argmax_equals_exhaustive_search_over_per_request_counts(seed):
    rng = np.random.default_rng(seed)
    reqs, columns, prefill = int(rng.integers(1, 4)), int(rng.integers(1, 5)), int(rng.integers(3))
    rho = _scores(rng, reqs, columns)
    limits = rng.integers(0, columns + 1, reqs)
    cost = np.cumsum(0.1 + rng.random(2 + prefill + reqs + reqs * columns)).astype(np.float32)
    cost = cost[: reqs + prefill + 1 + int(rng.integers(0, reqs * columns + 1))]
    got = choose_budget(rho, limits, cost, reqs + prefill)
    speed, _ = _exhaustive(rho, limits, cost.astype(np.float64), reqs + prefill)
    taken = cost[reqs + prefill + got.num_nodes]
    assert got.expected_tokens / taken == pytest.approx(speed, rel=1e-6)
    assert (got.counts <= limits).all()


def _algorithm_1(rho, cost, root_rows):
    """The paper's Algorithm 1: nodes are added until one no longer improves S."""
    accepted, best, chosen = 1.0, -np.inf, 0
    for n, score in enumerate(rho, start=1):
        accepted += score
        speed = accepted / cost[root_rows + n]
        if speed <= best:
            break
        best, chosen = speed, n
    return chosen


def test_recorded_steps_get_algorithm_1s_nodes():
    """A row more in C is a node more, seldom."""
    recording = load_recording(RECORDING)
    ranks = target_ranks(recording)
    exact = 24.0 + 0.034 * np.arange(72)
    below, further = 0, []
    steps = range(0, recording.num_steps, 3)
    for step in steps:
        rho = best_first(recording.topk_logprobs[step], ranks[step], 64).rho
        ours = choose_budget(rho[None, :64], [len(rho[:64])], exact, 1).num_nodes
        papers = _algorithm_1(rho, exact, 1)
        if ours != papers:
            expected = 1 + np.cumsum(rho)
            speeds = [expected[n - 1] / exact[1 + n] for n in (ours, papers)]
            assert speeds[0] == pytest.approx(speeds[1], rel=1e-6)
        below += papers < 64
        further.append(_algorithm_1(rho, exact, 2) - papers)
    assert below > 100, "the costs bind"
    assert set(further) == {0, 1}
    assert 0.005 < np.mean(further) < 0.03
