# SPDX-License-Identifier: Apache-2.0
"""Step-cost table: staircase, interpolation, monotone under noise, bad input."""

import numpy as np
import pytest

from vllm_bastion.policy.cost.forward_times import ForwardTimes
from vllm_bastion.policy.cost.table import StepCostTable, bucket_context, context_bucket


def test_a_step_costs_what_the_next_captured_size_costs():
    table = StepCostTable(
        [(1, 0, 5.0), (8, 0, 6.0), (16, 0, 9.0)], [(1, 2.0)], 0.5, max_rows=20,
        captured_sizes=(1, 8, 16),
    )  # fmt: skip
    cost = table.cost_ms(1, 0)
    assert cost.dtype == np.float32 and cost.shape == (21,)
    np.testing.assert_allclose(cost[1], 7.5)
    np.testing.assert_allclose(cost[2:9], 8.5)
    np.testing.assert_allclose(cost[9:17], 11.5)
    # beyond the largest graph: no padding, the last measured slope (3 ms / 8 rows)
    np.testing.assert_allclose(cost[17:21], 11.5 + 0.375 * np.arange(1, 5))


def test_without_graphs_measured_points_are_joined():
    cost = StepCostTable([(1, 0, 4.0), (5, 0, 8.0)], max_rows=5).cost_ms(1, 0)
    np.testing.assert_allclose(cost, [4, 4, 5, 6, 7, 8])


def test_captured_size_between_measured_ones_is_interpolated():
    table = StepCostTable([(1, 0, 4.0), (5, 0, 8.0)], max_rows=5, captured_sizes=(1, 3, 5))
    np.testing.assert_allclose(table.cost_ms(1, 0), [4, 4, 6, 6, 8, 8])


def test_context_axis_is_the_batch_total():
    samples = [(8, 0, 2.0), (8, 800, 4.0), (16, 0, 3.0), (16, 800, 5.0)]
    table = StepCostTable(samples, max_rows=16)
    one = table.forward_ms(1, bucket_context(context_bucket(400)))
    four = table.forward_ms(4, bucket_context(context_bucket(100)))
    # Buckets round the context by at most 6 % of 464 and 164 tokens; 2 ms are 800 tokens.
    np.testing.assert_allclose(one[8], 3.0, atol=0.06 * 464 * 2 / 800)
    np.testing.assert_allclose(four[8], 3.0, atol=0.06 * 4 * 164 * 2 / 800)
    assert table.forward_ms(1, 8000)[8] == 4.0, "level beyond the last context without a carrier"


class _Slope:
    def predict_ms(self, rows, context_len, num_reqs=1):
        return 100.0 + 0.01 * context_len * num_reqs + 0.0 * rows


def test_carrier_adds_its_difference_beyond_the_measured_contexts():
    table = StepCostTable([(8, 1000, 4.0)], max_rows=8, carrier=_Slope())
    context = bucket_context(context_bucket(3000))
    np.testing.assert_allclose(table.forward_ms(1, context)[8], 4.0 + 0.01 * (context - 1000))
    np.testing.assert_allclose(table.forward_ms(2, context)[8], 4.0 + 0.01 * (2 * context - 1000))


def test_noise_never_makes_a_larger_step_cheaper():
    rng = np.random.default_rng(0)
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, 64]
    samples = [
        (n, c, 5 + 0.02 * n + c / 1000 + rng.exponential(0.3), r)
        for n in sizes
        for c in (64, 512, 4096)
        for r in (1, 2)
        for _ in range(3)
    ]
    table = StepCostTable(samples, [(1, 1.2), (2, 1.1), (4, 1.5)], 0.1, max_rows=100)
    for reqs in (1, 2, 4, 9):
        for context in (0, 10, 700, 100_000):
            cost = table.cost_ms(reqs, context)
            assert np.isfinite(cost).all() and (cost > 0).all() and (np.diff(cost) >= 0).all()
    assert table.drafter_ms(1) <= table.drafter_ms(2) <= table.drafter_ms(8)


def test_positions_that_are_not_predicted_are_not_paid():
    table = StepCostTable(
        [(1, 0, 5.0)], [(1, 3.0), (4, 9.0)], max_rows=8, position_samples=[(1, 0.1), (4, 0.5)]
    )
    assert table.drafter_ms(1, spared=10) == pytest.approx(2.0)
    assert table.drafter_ms(4, spared=10) == pytest.approx(4.0)
    assert table.drafter_ms(2, spared=3) == pytest.approx(5.0 - 3 * (0.1 + 0.4 / 3))
    assert table.drafter_ms(4, spared=100) == 0.0
    assert StepCostTable([(1, 0, 5.0)], [(1, 3.0)], max_rows=8).drafter_ms(1, spared=10) == 3.0


def test_sizes_measured_at_different_batches_stay_monotone():
    # 64 rows of one request over 10 tokens were measured below 8 rows of 8 requests over 800
    table = StepCostTable([(8, 800, 5.0, 8), (64, 10, 4.0, 1)], max_rows=64)
    for reqs in (1, 3, 8, 20):
        assert (np.diff(table.cost_ms(reqs, 100)) >= 0).all()
    assert table.forward_ms(1, 10)[64] == pytest.approx(4.0)
    assert table.forward_ms(8, 800)[8] == pytest.approx(5.0)


def test_a_tree_and_as_many_requests_of_one_row_have_their_own_times():
    """64 rows: one request over 1000 tokens reads them once; 64 requests over 1000 read 64000."""
    base = {1: 10.0, 16: 11.0, 64: 14.0, 72: 20.0}
    plain = [(n, 0, ms, n) for n, ms in base.items()]
    plain += [(64, 1000, 14.0 + 6.4, 64), (1, 1000, 10.1, 1)]
    trees = [(n, 1000, base[n] + 0.5, 1) for n in (16, 64)]
    trees += [(64, 1000, 14.0 + 0.8, 4)]
    times = ForwardTimes([(n, float(c), ms, r) for n, c, ms, r in plain + trees], None)

    def at(reqs, context):
        return times.ms(reqs, reqs * context)

    np.testing.assert_array_equal(times.rows, list(base))
    np.testing.assert_allclose(at(1, 1000)[1:3], [11.5, 14.5])
    np.testing.assert_allclose(at(64, 1000)[2], 20.4)
    np.testing.assert_allclose(at(4, 1000)[2], 14.8)
    # the stairs of the matrix products stay where no tree was measured: 72 rows as 64, and 6 ms
    np.testing.assert_allclose(at(1, 1000)[3], 20.5)
    # between two batches in log R, at the same cached tokens; less context, less time
    at_two = [0.5 * 1000 / 1000, 0.8 * 1000 / 4000]
    np.testing.assert_allclose(at(2, 500)[2], 14.0 + np.mean(at_two))
    np.testing.assert_allclose(at(1, 500)[2], 14.25)
    np.testing.assert_allclose(at(1, 0), list(base.values()))


@pytest.mark.parametrize(("reqs", "nodes", "exact"), [(16, 8, True), (16, 48, True), (8, 8, False)])
def test_a_few_nodes_more_pay_for_their_rows_at_any_context(reqs, nodes, exact):
    """Dummy batches of more rows than requests have no context, which does not make them cheap."""
    base = {n: 10.0 + 0.5 * n for n in (1, 4, 8, 16, 24, 32, 64, 128)}
    samples = [(n, 0, ms, min(n, 16)) for n, ms in base.items()]
    # 16 requests: their caches cost 20 ms to read, and 0.4 ms more for each further row
    samples += [(n, 500, base[n] + 20.0 + 0.4 * (n - 16), 16) for n in (16, 64, 128)]
    samples += [(n, 500, base[n] + 2.0, 1) for n in (1, 4, 8, 16, 32)]
    context = bucket_context(context_bucket(500))
    cost = StepCostTable(samples, max_rows=128).forward_ms(reqs, context)
    added = cost[reqs + nodes] - cost[reqs]
    assert added >= 0.5 * nodes - 1e-6
    if exact:
        per_row = 0.5 + 0.4 * min(1.0, context / 500)
        assert added == pytest.approx(per_row * nodes, rel=0.02)


def test_one_slow_outlier_does_not_lift_the_larger_sizes():
    table = StepCostTable([(1, 0, 5.0), (2, 0, 50.0), (3, 0, 5.5), (4, 0, 6.0)] * 1, max_rows=4)
    assert table.cost_ms(1, 0)[4] < 50.0


def test_repeated_measurements_are_reduced_to_their_median():
    table = StepCostTable([(4, 0, 5.0), (4, 0, 5.2), (4, 0, 900.0)], max_rows=4)
    assert table.forward_ms(1, 0)[4] == pytest.approx(5.2)


def test_plain_step_has_no_drafter_and_its_own_overhead():
    table = StepCostTable(
        [(1, 0, 5.0), (4, 0, 8.0)], [(1, 3.0)], 2.0, max_rows=4, plain_aux_ms=0.25
    )
    assert table.plain_ms(1, 0) == pytest.approx(5.25)
    assert table.plain_ms(3, 0) == pytest.approx(7.25)
    assert table.cost_ms(1, 0)[1] == pytest.approx(10.0)


@pytest.mark.parametrize(
    "change",
    [
        {"samples": []}, {"samples": [[1, 0, float("nan")]]}, {"samples": [[1, 0, -1.0]]},
        {"samples": [[0, 0, 1.0]]}, {"samples": [[1, float("inf"), 1.0]]}, {"samples": [[1]]},
        {"drafter_samples": [[1, 0.0]]}, {"position_samples": [[1, -0.1]]}, {"aux_ms": -1.0},
        {"max_rows": 0}, {"captured_sizes": [0]},
    ],
)  # fmt: skip
def test_times_that_none_can_be_are_refused(change):
    with pytest.raises(ValueError):
        StepCostTable(**({"samples": [(1, 0, 1.0)], "max_rows": 4} | change))


def test_context_buckets_are_stable_and_fine():
    for context in [0, 1, 2, 10, 100, 8191, 131072]:
        bucket = context_bucket(context)
        assert context_bucket(bucket_context(bucket)) == bucket
        assert abs(bucket_context(bucket) - context) <= 0.06 * (context + 64)
