# SPDX-License-Identifier: Apache-2.0
"""A disturbed measurement is found, is not used, and leaves the others as they are."""

from __future__ import annotations

import random

import pytest

from vllm_bastion.policy.cost.doubts import doubts, settled, settled_by_requests
from vllm_bastion.policy.cost.forward_times import Sample
from vllm_bastion.policy.cost.table import StepCostTable

ROWS = (1, 4, 8, 16, 32, 64)


def true_ms(rows: int, context: float = 0.0) -> float:
    return 9.0 + 0.06 * rows + 0.001 * context


def clean(noise: float = 0.05, seed: int = 0) -> list[Sample]:
    """Five repeats of each size without context, and of trees of one request with context."""
    draw = random.Random(seed)
    return [
        (rows, context, true_ms(rows, context) * (1 + noise * draw.random()), reqs)
        for rows in ROWS
        for context, reqs in ((0.0, rows), (128.0, 1), (2048.0, 1))
        for _ in range(5)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_ordinary_noise_raises_no_doubt(seed: int) -> None:
    samples = clean(noise=0.3, seed=seed)
    assert not doubts(samples) and settled(samples) == samples


def with_slow(point: tuple[int, float, int], factor: float) -> list[Sample]:
    return [(r, c, ms * factor if (r, c, q) == point else ms, q) for r, c, ms, q in clean()]


@pytest.mark.parametrize(
    ("point", "against"),
    [
        ((16, 0.0, 16), "32 rows"),  # another number of requests, and no context
        ((16, 128.0, 1), "32 rows"),
        ((64, 128.0, 1), "2048 cached tokens"),
        ((1, 0.0, 1), "with 128 cached tokens they"),
    ],
)
def test_a_slow_point_contradicts_a_larger_one(point: tuple[int, float, int], against: str) -> None:
    samples = with_slow(point, 30.0)
    (doubt,) = doubts(samples)
    assert doubt.point == point and against in doubt.text()
    true = true_ms(*point[:2])
    assert true < doubt.used_ms < 1.5 * true
    others = [sample for sample in samples if (sample[0], sample[1], sample[3]) != point]
    assert settled(samples)[: len(others)] == others


def test_the_costs_of_a_table_are_near_the_undisturbed_ones() -> None:
    expected = StepCostTable(clean(), max_rows=64).cost_ms(1, 0)
    table = StepCostTable(with_slow((16, 0.0, 16), 30.0), max_rows=64)
    assert abs(table.cost_ms(1, 0) / expected - 1).max() < 0.15


def test_repeats_that_disagree_count_as_the_lower_ones() -> None:
    """The largest size has no larger one to contradict it."""
    samples = [s for s in clean() if s[:2] != (64, 0.0)]
    times = [12.9, 13.0, 180.0, 190.0, 200.0]
    (doubt,) = doubts([*samples, *((64, 0.0, ms, 64) for ms in times)])
    assert doubt.used_ms == 13.0 and "at other times" in doubt.text()


def test_a_graphs_end_and_short_steps_raise_no_doubt() -> None:
    assert not doubts([(260, 0.0, 7.0, 1), (512, 0.0, 7.4, 1), (516, 0.0, 19.0, 1)])
    assert not doubts([(1, 0.0, 0.5, 1), (2, 0.0, 0.2, 1)])  # ms


def test_a_slow_draft_does_not_raise_those_of_more_requests() -> None:
    assert settled_by_requests([3.0, 90.0, 4.0, 5.0]) == [3.0, 4.0, 4.0, 5.0]
    assert settled_by_requests([3.0, 4.1, 4.0]) == [3.0, 4.1, 4.0]
    table = StepCostTable([(1, 0, 5.0)], [(1, 3.0), (4, 90.0), (16, 4.0)], max_rows=1)
    assert table.drafter_ms(16) == 4.0
