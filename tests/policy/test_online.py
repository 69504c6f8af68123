# SPDX-License-Identifier: Apache-2.0
"""Latency models: staircase, drift, noise, outliers."""

import numpy as np
import pytest

from vllm_bastion.policy.cost.correction import Correction
from vllm_bastion.policy.cost.online import CurveLatency, TableLatency, make_latency
from vllm_bastion.policy.cost.table import StepCostTable

SIZES = (1, 8, 16, 32, 64)


class _Line:
    """2 ms + 0.1 ms a row + 1 us a cached token."""

    def predict_ms(self, rows, context_len, num_reqs=1):
        return 2.0 + 0.1 * np.asarray(rows, dtype=float) + 0.001 * context_len * num_reqs


def _table():
    samples = [(n, 0, 2.0 + 0.1 * n) for n in SIZES]
    return StepCostTable(samples, [(1, 1.5)], 0.5, max_rows=64, captured_sizes=SIZES)


@pytest.mark.parametrize("name", ["ema_table", "static", "ema", "ema_calib"])
def test_curves_are_taken_at_captured_sizes_with_drafter_and_overhead(name):
    model = make_latency(name, _table(), roofline=_Line(), calibrated=_Line())
    cost = model.cycle_cost_ms(1, 0)
    np.testing.assert_allclose(cost, _table().cost_ms(1, 0), rtol=1e-6)
    assert cost[9] == cost[16] > cost[8]
    assert model.plain_ms(3, 0) == pytest.approx(2.8 + 0.5)


def test_names_choose_curves():
    table, bare, fitted = _table(), _Line(), _Line()
    assert isinstance(make_latency("table", table), TableLatency)
    static = make_latency("static", table, roofline=bare, calibrated=fitted)
    assert static.curve is fitted and static.correction is None
    assert make_latency("ema", table, roofline=bare, calibrated=fitted).curve is bare
    assert make_latency("ema_calib", table, roofline=bare, calibrated=fitted).curve is fitted
    with pytest.raises(ValueError, match=r"'ema_calib'.*use 'ema_table'"):
        make_latency("ema_calib", table, roofline=bare)
    with pytest.raises(ValueError, match="one of table, ema_table, static, ema, ema_calib"):
        make_latency("fast", table)


def _run(model, factor, steps, rng, noise=0.0, spikes=()):
    for i in range(steps):
        rows = int(rng.integers(1, 65))
        truth = float(_Line().predict_ms(model.table.padded_rows[rows], 0)) * factor
        ms = truth * (1 + noise * rng.standard_normal()) * (40.0 if i in spikes else 1.0)
        model.observe(rows, 1, 0, ms)


def _factors(model):
    return [model.correction.root, model.correction.added]


def test_slowdown_mid_run_is_followed():
    model = CurveLatency(_Line(), _table(), online=True)
    rng = np.random.default_rng(0)
    _run(model, 1.0, 100, rng, noise=0.05)
    assert _factors(model) == pytest.approx([1.0, 1.0], abs=0.05)
    _run(model, 1.5, 60, rng, noise=0.05)
    assert _factors(model) == pytest.approx([1.5, 1.5], abs=0.1)
    forward = (model.cycle_cost_ms(1, 0) - 2.0).astype(float)
    expected = 1.5 * (_table().cost_ms(1, 0) - 2.0)
    np.testing.assert_allclose(forward[1:], expected[1:], rtol=0.05)


@pytest.mark.parametrize("first, more", [(1.4, 0.8), (0.8, 1.4), (1.0, 0.5)])
@pytest.mark.parametrize("roots", [1, 3])
def test_rows_and_roots_change_apart(first, more, roots):
    """A busy memory bus slows what the first row waits for; a lower clock what the others add."""
    model, rng = CurveLatency(_Line(), _table(), online=True), np.random.default_rng(7)
    alone = float(_Line().predict_ms(model.table.padded_rows[roots], 0))
    for _ in range(400):
        rows = int(rng.integers(roots, 33))
        added = float(_Line().predict_ms(model.table.padded_rows[rows], 0)) - alone
        ms = (first * alone + more * added) * (1 + 0.04 * rng.standard_normal())
        model.observe(rows, roots, 0, ms)
    assert _factors(model) == pytest.approx([first, more], rel=0.1)
    cost = model.cycle_cost_ms(roots, 0) - 2.0
    added = float(_Line().predict_ms(64, 0)) - alone
    assert cost[64] == pytest.approx(first * alone + more * added, rel=0.1)
    assert (np.diff(cost) >= 0).all() and cost[0] > 0
    assert model.plain_ms(roots, 0) == pytest.approx(first * alone + 0.5, rel=0.1)


def test_steps_of_one_size_say_nothing_of_others():
    model, rng = CurveLatency(_Line(), _table(), online=True), np.random.default_rng(8)
    for _ in range(400):
        model.observe(16, 1, 0, 3.6 * 1.5 * (1 + 0.05 * rng.standard_normal()))
    assert model.correction.added / model.correction.root == pytest.approx(1.0, abs=0.01)


def test_fixed_models_ignore_observations():
    for name in ("table", "static"):
        model = make_latency(name, _table(), roofline=_Line(), calibrated=_Line())
        before = model.cycle_cost_ms(1, 0)
        for _ in range(50):
            model.observe(8, 1, 0, 500.0)
            model.observe_plain(3.0)
        assert model.cycle_cost_ms(1, 0) is before


def test_bare_roofline_far_off_is_corrected_at_once():
    model = CurveLatency(_Line(), _table(), online=True)
    _run(model, 30.0, 12, np.random.default_rng(1))
    assert _factors(model) == pytest.approx([30.0, 30.0], rel=0.01)


def test_isolated_stalls_do_nothing():
    model = CurveLatency(_Line(), _table(), online=True)
    _run(model, 1.0, 200, np.random.default_rng(2), noise=0.02, spikes={20, 50, 51, 90, 150})
    assert _factors(model) == pytest.approx([1.0, 1.0], abs=0.03)


def test_a_burst_of_stalls_is_bounded_and_forgotten():
    model = CurveLatency(_Line(), _table(), online=True)
    rng = np.random.default_rng(3)
    _run(model, 1.0, 50, rng)
    _run(model, 40.0, 6, rng)
    # four of the six reach the median; each may add at most alpha * (1.5 - 1) = 5 %
    assert max(_factors(model)) < 1.05**6
    _run(model, 1.0, 120, rng)
    assert _factors(model) == pytest.approx([1.0, 1.0], abs=0.01)


def test_the_first_use_of_every_size_is_ignored():
    correction = Correction()
    for size in SIZES:
        correction.observe(size, 1.0, 1.0, 100.0)
    assert correction.root == correction.added == 1.0
    correction.observe(1, 1.0, 0.0, 2.0)
    assert correction.root == correction.added == 2.0


def test_plain_steps_correct_the_costs_of_drafting():
    model, truth, rng = CurveLatency(_Line(), _table(), online=True), 1.0, np.random.default_rng(9)
    for step in range(400):
        truth = 1.4 if step >= 100 else 1.0
        stall = 30.0 if step % 9 == 0 else 1.0
        ms = (2.1 * truth + 0.5) * (1 + 0.05 * rng.standard_normal()) * stall
        model.observe_plain(ms / model.plain_ms(1, 0))
        if step == 99:
            assert _factors(model) == pytest.approx([1.0, 1.0], abs=0.06)
    assert _factors(model) == pytest.approx([1.4, 1.4], rel=0.05)


def test_nonsense_is_ignored():
    correction = Correction()
    for ms in (float("nan"), float("inf"), 0.0, -3.0):
        for _ in range(3):
            correction.observe(8, 1.0, 1.0, ms)
        for _ in range(5):
            correction.observe_plain(ms)
    assert correction.root == correction.added == 1.0


def test_costs_are_the_same_object_until_the_correction_changes():
    model = CurveLatency(_Line(), _table(), online=True)
    _run(model, 1.0, 30, np.random.default_rng(4))
    cost = model.cycle_cost_ms(1, 100)
    _run(model, 1.001, 5, np.random.default_rng(5))
    assert model.cycle_cost_ms(1, 100) is cost
    _run(model, 1.5, 40, np.random.default_rng(6))
    assert model.cycle_cost_ms(1, 100) is not cost
    assert not model.cycle_cost_ms(1, 100).flags.writeable
