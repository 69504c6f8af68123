# SPDX-License-Identifier: Apache-2.0
"""Which steps a calibration times; tests/e2e checks that it times them correctly."""

from __future__ import annotations

import time
from types import SimpleNamespace

from vllm_bastion.calibration import measure
from vllm_bastion.calibration.points import sizes_to_measure, tree_shapes


def test_sizes_beyond_the_graphs_are_measured_too() -> None:
    assert sizes_to_measure([8, 64, 512], 8192) == [8, 64, 512, 513, 1026, 2052, 4104]
    assert sizes_to_measure([8, 64, 512], 512) == [8, 64, 512]
    assert sizes_to_measure([], 20) == [1, 2, 4, 8, 12, 16, 17, 20]


def test_trees_of_one_and_a_few_requests_are_measured() -> None:
    """The paper's case, one request and the largest tree, is always among them."""
    one = [(1, 3), (1, 7), (1, 15), (1, 31), (1, 63)]
    assert tree_shapes(63, 512, 1) == one
    assert tree_shapes(63, 128, 256) == [*one, (4, 3), (4, 7), (4, 15), (4, 31), (16, 3), (16, 7)]
    assert [shape for shape in tree_shapes(63, 8192, 256) if shape[0] > 16] == [(64, 3), (64, 7)]
    assert tree_shapes(64, 65, 4)[:6] == [*one, (1, 64)]
    assert tree_shapes(1, 2, 8) == [(1, 1)]


def test_every_size_is_timed_before_any_is_timed_again() -> None:
    """A slow period of the machine must affect all sizes, not one; a slow size is timed once."""
    seen = []
    alone = SimpleNamespace(rank_in_group=0, broadcast_object=lambda value, src: value)

    def run(rows: int, context: int) -> None:
        seen.append((rows, context))
        time.sleep(0.5 if rows == 64 else 0.0)

    points = [(1, 0), (64, 0), (8, 128)]
    rounds = measure._rounds(run, points, alone)
    assert seen == points  # the first run is not a measurement
    assert rounds == [points, *[[(1, 0), (8, 128)]] * 4]


def test_only_doubtful_points_are_timed_again() -> None:
    """A plain step and a tree, as they were named the first time; nothing once time is up."""

    def step(rows: int, reqs: int) -> SimpleNamespace:
        return SimpleNamespace(num_target_tokens=rows, num_reqs=reqs)

    plain = [(0, step(16, 16)), (0, step(32, 32)), (128, step(4, 4))]
    trees = [(128, None, step(16, 1)), (128, None, step(64, 4))]
    padded = {16: 24, 64: 64}
    later = time.perf_counter() + 60
    found = {(16, 0.0, 16), (24, 128.0, 1), (4, 128.0, 4)}
    again = measure._again(found, plain, trees, padded, later)
    assert again == ([(4, 128), (16, 0)], [(1, 15, 128)])
    assert measure._again(set(), plain, trees, padded, later) is None
    assert measure._again(found, plain, trees, padded, time.perf_counter() - 1) is None
