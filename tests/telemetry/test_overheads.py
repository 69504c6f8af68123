# SPDX-License-Identifier: Apache-2.0
"""What `benchmarks.telemetry` makes of blocks of steps whose cost is known."""

from __future__ import annotations

import random

import pytest

from benchmarks.telemetry import METRICS, OFF, PAGE, Block, overheads

MODES = [OFF, METRICS, PAGE]


def blocks(rounds: int, cost: dict[str, float], noise: float) -> list[Block]:
    """Steps of 1 to 4 nodes, a millisecond a row, on a machine whose speed drifts by half."""
    draw, out = random.Random(1), []
    for number in range(rounds):
        for mode in draw.sample(MODES, len(MODES)):
            sizes = [(1, draw.randint(1, 4)) for _ in range(16)]
            factor = cost[mode] * (1.0 + 0.5 * number / rounds)
            times = [1e-3 * (1 + n) * factor * draw.uniform(1, 1 + noise) for _, n in sizes]
            out.append(Block(mode, sizes, times))
    return out


def test_a_small_cost_is_found_although_steps_differ() -> None:
    cost = {OFF: 1.0, METRICS: 1.01, PAGE: 1.0}
    found = overheads(blocks(200, cost, noise=0.1), MODES)
    for mode, expected in ((METRICS, 1.01), (PAGE, 1.0)):
        mean, low, high, rounds = found[mode]
        assert low <= mean <= high and rounds == 200
        assert mean == pytest.approx(expected, abs=0.002)
    assert found[METRICS][1] > 1.0 >= found[PAGE][1]


def test_an_interruption_counts_little() -> None:
    given = blocks(100, dict.fromkeys(MODES, 1.0), noise=0.01)
    for block in given[:3]:
        if block.mode == METRICS:
            block.seconds[5] += 10.0
    mean, *_, rounds = overheads(given, MODES)[METRICS]
    assert rounds == 100 and mean == pytest.approx(1.0, abs=0.002)
