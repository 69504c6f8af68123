# SPDX-License-Identifier: Apache-2.0
"""The budget on the host: against exhaustive search and the device op."""

import itertools

import numpy as np
import pytest
import torch

from bastion_kernels import choose_budget as choose_budget_op
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


@pytest.mark.parametrize("seed", range(12))
def test_counts_equal_the_device_op(seed):
    # coarse scores make many ties across and within the rows
    rng = np.random.default_rng(seed)
    reqs, columns = 5, 60
    log_rho = np.log(-np.sort(-np.ceil(8 * rng.random((reqs, columns)) ** 2) / 8, axis=1))
    log_rho = log_rho.astype(np.float32)
    limits = rng.integers(0, columns + 1, reqs).astype(np.int32)
    cost = (1.0 + np.cumsum(rng.random(200) ** 4 * 0.1)).astype(np.float32)
    base_rows = reqs + int(rng.integers(0, 20))
    counts = torch.full((reqs,), -7, dtype=torch.int32)
    choose_budget_op(
        torch.from_numpy(log_rho),
        torch.arange(reqs),
        torch.from_numpy(limits),
        torch.from_numpy(cost),
        base_rows,
        counts,
    )
    got = choose_budget(np.exp(log_rho.astype(np.float64)), limits, cost, base_rows)
    np.testing.assert_array_equal(got.counts, counts.numpy())


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
    """Equal but for ties within the costs' float32; a row more in C is a node more, seldom."""
    recording = load_recording(RECORDING)
    ranks = target_ranks(recording)
    exact = 24.0 + 0.034 * np.arange(72)
    cost = torch.tensor(exact, dtype=torch.float32)
    slots, limits = torch.tensor([0]), torch.tensor([64], dtype=torch.int32)
    below, further = 0, []
    steps = range(0, recording.num_steps, 3)
    for step in steps:
        rho = best_first(recording.topk_logprobs[step], ranks[step], 64).rho
        counts = torch.zeros(1, dtype=torch.int32)
        log_rho = torch.tensor(np.log(rho), dtype=torch.float32)[None]
        choose_budget_op(log_rho, slots, limits, cost, 1, counts)
        ours, papers = int(counts), _algorithm_1(rho, exact, 1)
        if ours != papers:
            expected = 1 + np.cumsum(rho)
            speeds = [expected[n - 1] / exact[1 + n] for n in (ours, papers)]
            assert speeds[0] == pytest.approx(speeds[1], rel=1e-6)
        below += papers < 64
        further.append(_algorithm_1(rho, exact, 2) - papers)
    assert below > 100, "the costs bind"
    assert set(further) == {0, 1}
    assert 0.005 < np.mean(further) < 0.03
