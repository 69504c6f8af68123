# SPDX-License-Identifier: Apache-2.0
"""Latency models: staircase, drift, noise, outliers, and what one kind of step tells of another."""

import math
from collections import Counter

import numpy as np
import pytest
from vllm_bastion.policy.controller import Batch, Controller
from vllm_bastion.policy.cost.corrected import CorrectedLatency
from vllm_bastion.policy.cost.models import make_latency
from vllm_bastion.policy.cost.paper import CurveLatency
from vllm_bastion.policy.cost.table import StepCostTable
from vllm_bastion.policy.remaining import NO_LIMIT
from vllm_bastion.step_times import StepTimes

SIZES = (1, 8, 16, 32, 64)


class _Line:
    """2 ms + 0.1 ms a row + 1 us a cached token."""

    def predict_ms(self, rows, context_len, num_reqs=1):
        return 2.0 + 0.1 * np.asarray(rows, dtype=float) + 0.001 * context_len * num_reqs


def _table():
    samples = [(n, 0, 2.0 + 0.1 * n) for n in SIZES]
    return StepCostTable(samples, [(1, 1.5)], 0.5, max_rows=64, captured_sizes=SIZES)


def _tree(rows, ms, num_reqs=1):
    """A step with trees whose forward pass took `ms`, and all of it `ms` + 2."""
    return StepTimes(rows, num_reqs, 0.0, True, True, ms, ms + 2.0)


def _plain(ms, num_reqs=1):
    return StepTimes(num_reqs, num_reqs, 0.0, False, False, ms, ms)


@pytest.mark.parametrize("name", ["table", "ema_table", "static", "ema", "ema_calib"])
def test_curves_are_taken_at_captured_sizes_with_drafter_and_overhead(name):
    model = make_latency(name, _table(), roofline=_Line(), calibrated=_Line())
    estimate = model.estimate(1, 0)
    np.testing.assert_allclose(estimate.tree_ms, _table().cost_ms(1, 0), rtol=1e-6)
    assert estimate.tree_ms[9] == estimate.tree_ms[16] > estimate.tree_ms[8]
    assert model.estimate(3, 0).plain_ms == pytest.approx(2.8 + 0.5)
    assert model.plain_age(1) == (math.inf if name == "ema_table" else 0.0)


@pytest.mark.parametrize("name", ["table", "ema_table", "ema"])
def test_a_draft_of_fewer_positions_is_cheaper_and_teaches_the_same(name):
    table = StepCostTable(
        [(n, 0, 2.0 + 0.1 * n) for n in SIZES], [(1, 1.5)], max_rows=64, captured_sizes=SIZES,
        position_samples=[(1, 0.1)],
    )  # fmt: skip
    model = make_latency(name, table, roofline=_Line(), calibrated=_Line())
    whole, part = model.estimate(1, 0), model.estimate(1, 0, spared=10)
    np.testing.assert_allclose(whole.tree_ms - part.tree_ms, 1.0, rtol=1e-5)
    assert part.plain_ms == whole.plain_ms
    # Steps that take what they should, with drafts of either kind, correct nothing.
    for spared in (0, 10) * 20:
        total = model.estimate(1, 0, spared).tree_step_ms(16)
        forward = total - (1.5 - 0.1 * spared)
        model.observe(StepTimes(16, 1, 0.0, True, True, forward, total, spared))
    np.testing.assert_allclose(model.estimate(1, 0).tree_ms, whole.tree_ms, rtol=1e-3)


def test_names_choose_curves():
    table, bare, fitted = _table(), _Line(), _Line()
    both = {"roofline": bare, "calibrated": fitted}
    assert make_latency("table", table).curve is None
    assert make_latency("static", table, **both).curve is fitted
    assert make_latency("static", table, **both).factor is None
    assert make_latency("ema", table, **both).curve is bare
    assert make_latency("ema_calib", table, **both).curve is fitted
    with pytest.raises(ValueError, match=r"'ema_calib'.*use 'ema_table'"):
        make_latency("ema_calib", table, roofline=bare)
    with pytest.raises(ValueError, match="one of table, ema_table, static, ema, ema_calib"):
        make_latency("fast", table)


def test_fixed_models_ignore_observations():
    for name in ("table", "static"):
        model = make_latency(name, _table(), roofline=_Line(), calibrated=_Line())
        before = model.estimate(1, 0)
        for _ in range(50):
            model.observe(_tree(8, 500.0))
            model.observe(_plain(300.0))
        assert model.estimate(1, 0) is before


def test_the_papers_factor_follows_the_forward_time():
    model = CurveLatency(_table(), _Line(), online=True)
    for _ in range(12):
        model.observe(_tree(16, 30 * 3.6))
    assert model.factor == pytest.approx(30.0)
    for step in range(60):
        model.observe(_tree(16, 45 * 3.6 * (1.05 if step % 2 else 0.95)))
    assert model.factor == pytest.approx(45.0, rel=0.03)
    assert model.estimate(1, 0).tree_ms[16] == pytest.approx(45 * 3.6 + 2.0, rel=0.03)


def _serve(model, steps, rng, *, plain=1.0, root=1.0, added=1.0, noise=0.05, spikes=(), drafts=0.9):
    """Steps of one request, four of a kind in a row.

    Factors on plain steps, and on a tree step's roots and further rows.
    """
    prior, trees = _table().cost_ms(1, 0).astype(float), True
    for i in range(steps):
        if i % 4 == 0:
            trees = rng.random() < drafts
        error = (1 + noise * rng.standard_normal()) * (40.0 if i in spikes else 1.0)
        if trees:
            rows = int(rng.integers(2, 33))
            total = error * (root * prior[1] + added * (prior[rows] - prior[1]))
            model.observe(StepTimes(rows, 1, 0.0, True, True, total - 2.0, total))
        else:
            model.observe(_plain(error * plain * 2.6))


def _costs(model, num_reqs=1):
    estimate = model.estimate(num_reqs, 0)
    return estimate.plain_ms, float(estimate.tree_ms[1]), float(estimate.tree_ms[32])


@pytest.mark.parametrize(
    "plain, root, added", [(1, 1, 1), (0.6, 1, 1), (1.5, 0.8, 0.8), (1, 1.4, 0.8), (1, 0.8, 1.4)]
)
def test_both_kinds_of_step_and_their_rows_are_told_apart(plain, root, added):
    model = CorrectedLatency(_table())
    _serve(model, 500, np.random.default_rng(7), plain=plain, root=root, added=added)
    expected = 2.6 * plain, 4.1 * root, 4.1 * root + 3.1 * added
    assert _costs(model) == pytest.approx(expected, rel=0.08)
    tree_ms = model.estimate(1, 0).tree_ms
    assert (np.diff(tree_ms) >= 0).all() and tree_ms[0] > 0


@pytest.mark.parametrize("copies", [False, True])
def test_the_first_plain_step_after_others_does_not_count(copies):
    model, rng = CorrectedLatency(_table()), np.random.default_rng(2)
    _serve(model, 200, rng, drafts=0.5)
    for _ in range(200):
        _serve(model, 1, rng, drafts=1.0)
        if copies:
            model.observe(StepTimes(8, 1, 0.0, True, False, 3.1, 3.1, copies=True))
        for factor in (1.4, 1.0):
            model.observe(_plain(factor * 2.6))
    assert _costs(model) == pytest.approx((2.6, 4.1, 7.2), rel=0.06)
    # Of several plain steps together the last one is told, which follows another one.
    for _ in range(200):
        _serve(model, 1, rng, drafts=1.0)
        model.observe(_plain(1.4 * 2.6), passed=4)
    assert _costs(model)[0] == pytest.approx(1.4 * 2.6, rel=0.1)


def test_steps_that_look_for_copies_show_what_a_look_costs():
    """On the tiny target a look takes 0.7 ms, and P would be read too high by it."""
    model = CorrectedLatency(_table())
    assert model.estimate(1, 0).look_ms == 0.0
    for step in range(100):
        looks = step < 50
        ms = 2.0 + 0.7 * looks
        model.observe(StepTimes(1, 1, 0.0, False, False, ms, ms, looked=looks))
        if step == 49:  # as good as plain steps while there are no others
            assert model.estimate(1, 0).plain_ms == pytest.approx(2.7, rel=0.02)
            assert model.plain_age(1) == math.inf
    found = model.estimate(1, 0)
    assert found.plain_ms == pytest.approx(2.0, rel=0.02)
    assert found.look_ms == pytest.approx(0.7, rel=0.1)


@pytest.mark.parametrize("drafts", [0.0, 1.0])
def test_each_kind_of_step_shows_that_the_machine_changed(drafts):
    model, rng = CorrectedLatency(_table()), np.random.default_rng(9)
    _serve(model, 200, rng, drafts=0.5)
    _serve(model, 200, rng, plain=1.4, root=1.4, added=1.4, drafts=drafts)
    assert _costs(model) == pytest.approx((1.4 * 2.6, 1.4 * 4.1, 1.4 * 7.2), rel=0.12)


def _controlled(steps, gain, plain_ms, tree_factor=1.0):
    """Reasons of a controller's decisions about one request.

    Trees emit `gain` times as many tokens a ms as plain steps, by their prior costs.

    Args:
        plain_ms: of a step of this number, which takes 2.6 by its prior cost.
        tree_factor: on steps with trees.
    """
    model, reasons, verified = CorrectedLatency(_table()), [], False
    control = Controller(15, 4, model)
    tree_ms = model.estimate(1, 0).tree_step_ms(8)
    tokens = gain * tree_ms / 2.6 - 1.0
    for step in range(steps):
        decision = control.plan(Batch([0], [NO_LIMIT], 1, 0.0))
        reasons.append(decision.reason)
        if decision.drafts:
            control.gains.add_trees([0], [tokens], [7])
            control.gains.add_outcomes([0], [tokens], [tokens])
        forward = tree_factor * tree_ms - 2.0 if verified else plain_ms(step)
        total = forward + 2.0 * (verified and decision.drafts)
        rows = 8 if verified else 1
        control.observe([StepTimes(rows, 1, 0.0, verified, decision.drafts, forward, total)])
        verified = decision.drafts
    return reasons


def test_plain_steps_that_became_faster_are_noticed_while_trees_run():
    """Trees are expected to pay 1.25 times; then plain steps take half as long as before."""
    reasons = _controlled(2500, 1.25, lambda step: 2.6 if step < 800 else 1.3)
    before, after = Counter(reasons[:800]), Counter(reasons[-500:])
    assert before["pays"] > 750 and 8 <= before["trial of plain steps"] <= 24
    assert after["does not pay"] > 450


def test_a_stall_of_the_first_plain_step_does_not_make_trees_pay_for_ever():
    """They take twice as long as was calibrated, and lose a quarter."""
    # The one before the first trees ends with a draft, and the one after them does not count.
    plain = iter([2.6, 2.6, 26.0])
    reasons = _controlled(1000, 1.5, lambda step: next(plain, 2.6), tree_factor=2.0)
    assert Counter(reasons[-500:])["does not pay"] > 450


def test_another_size_of_batch_starts_from_the_nearest():
    model, rng = CorrectedLatency(_table()), np.random.default_rng(4)
    assert model.plain_age(1) == math.inf
    _serve(model, 200, rng, plain=0.7, drafts=0.5)
    assert model.estimate(4, 0).plain_ms == pytest.approx(0.7 * 3.3, rel=0.06)
    assert model.plain_age(4) == 0, "plain steps need not be tried at once"
    for age in range(1, 20):
        model.observe(_tree(16, 4.0, num_reqs=4))
        assert model.plain_age(4) in (age - 1, age), "the first step of a kind is skipped"
    assert model.plain_age(1) < 20, "each size has its own"
    before = model.estimate(1, 0).plain_ms
    for _ in range(50):
        model.observe(_plain(20.0, num_reqs=4))
    assert model.estimate(4, 0).plain_ms == pytest.approx(20.0, rel=0.1)
    assert model.estimate(1, 0).plain_ms == before


def test_a_stalled_first_step_is_outvoted():
    for kind in (_plain, lambda ms: _tree(8, ms - 2.0)):
        model = CorrectedLatency(_table())
        usual = 2.6 if kind is _plain else 4.8
        for factor in (1.0, 1.0, 10.0, 1.0, 1.0, 1.0):
            model.observe(kind(factor * usual))
        assert _costs(model)[:2] == pytest.approx((2.6, 4.1), rel=0.05)


def test_steps_beyond_the_graphs_say_nothing_of_those_in_graphs():
    """On an H100, 516 rows took 2.3 times their prior, and 260 were then thought to take 1.6."""
    table = StepCostTable.linear(5.0, 0.01, max_rows=1024, captured_sizes=[1, 4, 64, 256, 512])
    model, rng = CorrectedLatency(table), np.random.default_rng(5)
    prior = table.cost_ms(4, 0)
    for _ in range(60):
        for rows, factor in ((260, 1.0), (512, 1.0), (516, 2.3), (1000, 2.3)):
            ms = factor * float(prior[rows]) * (1 + 0.03 * rng.standard_normal())
            model.observe(StepTimes(rows, 4, 0.0, True, True, ms, ms))
    expected = [float(prior[n]) * (1.0 if n <= 512 else 2.3) for n in (64, 260, 512, 516, 1000)]
    for num_reqs in (4, 5, 1):
        cost = model.estimate(num_reqs, 0)
        found = [cost.tree_step_ms(n) for n in (64, 260, 512, 516, 1000)]
        assert found == pytest.approx(expected, rel=0.08)
        assert (np.diff(cost.curve) >= 0).all()


def test_what_steps_beyond_the_graphs_take_is_followed():
    table = StepCostTable.linear(5.0, 0.01, max_rows=1024, captured_sizes=[1, 4, 64, 256, 512])
    model, ms = CorrectedLatency(table), float(table.cost_ms(4, 0)[516])
    for factor, steps in ((2.3, 2000), (1.2, 60)):
        for _ in range(steps):
            model.observe(StepTimes(516, 4, 0.0, True, True, factor * ms, factor * ms))
        assert model.estimate(4, 0).tree_step_ms(516) == pytest.approx(factor * ms, rel=0.08)


def test_a_batch_whose_roots_have_no_graph_is_learned_like_any_other():
    table = StepCostTable.linear(5.0, 0.1, max_rows=64, captured_sizes=[1, 2])
    model, prior = CorrectedLatency(table), table.cost_ms(8, 0)
    for _ in range(200):
        model.observe(_plain(2 * float(prior[8]), num_reqs=8))
        model.observe(_plain(2 * float(prior[8]), num_reqs=8))
        ms = 2 * float(prior[40])
        model.observe(StepTimes(40, 8, 0.0, True, True, ms, ms))
    cost = model.estimate(8, 0)
    found = [cost.plain_ms, cost.tree_step_ms(8), cost.tree_step_ms(40)]
    assert found == pytest.approx([2 * float(prior[n]) for n in (8, 8, 40)], rel=0.06)


def test_isolated_stalls_do_little():
    model = CorrectedLatency(_table())
    _serve(model, 200, np.random.default_rng(2), spikes={20, 50, 51, 90, 150})
    assert _costs(model) == pytest.approx((2.6, 4.1, 7.2), rel=0.06)


def test_a_burst_of_stalls_is_bounded_and_forgotten():
    model, rng = CorrectedLatency(_table()), np.random.default_rng(3)
    _serve(model, 100, rng)
    _serve(model, 6, rng, spikes=range(6))
    assert _costs(model) <= (2 * 2.6, 2 * 4.1, 2 * 7.2)
    _serve(model, 120, rng)
    assert _costs(model) == pytest.approx((2.6, 4.1, 7.2), rel=0.06)


def test_what_is_no_whole_step_of_a_kind_is_ignored():
    model = CorrectedLatency(_table())
    before = model.estimate(1, 0)
    for ms in (float("nan"), float("inf"), 0.0, -3.0):
        for _ in range(3):
            model.observe(StepTimes(8, 1, 0.0, True, True, 1.0, ms))
    for _ in range(5):
        model.observe(StepTimes(8, 1, 0.0, True, True, 100.0, None))
    assert model.estimate(1, 0) == before
    for _ in range(8):
        model.observe(_tree(8, before.tree_step_ms(8) - 2.0))
    known = _costs(model)
    for _ in range(5):
        model.observe(StepTimes(8, 1, 0.0, True, False, 100.0, 100.0))
        model.observe(StepTimes(1, 1, 0.0, False, True, 100.0, 100.0))
    assert _costs(model) == pytest.approx(known)


def test_halves_of_steps_with_trees_teach_where_no_whole_one_is_timed():
    """With short replies, prompts come between most drafts and the steps that verify them."""
    model = CorrectedLatency(_table())
    before = model.estimate(1, 0)
    for _ in range(20):
        model.observe(_plain(2.6))
        model.observe(_plain(2.6))
        # Twice what the table says of steps with trees: 4.1 ms with one row, 4.8 with 8.
        model.observe(StepTimes(1, 1, 0.0, False, True, 2.6, 8.2))
        model.observe(StepTimes(8, 1, 0.0, True, False, 3.0, 9.6 - (8.2 - 2.6)))
    after = model.estimate(1, 0)
    assert after.tree_step_ms(8) == pytest.approx(2.0 * before.tree_step_ms(8), rel=0.05)
    assert after.plain_ms == pytest.approx(2.6)


def test_steps_of_copies_have_a_time_of_their_own():
    """To grow, verify and walk copies takes 3 ms here, of which a plain step knows nothing."""
    model = CorrectedLatency(_table())
    nodes_ms = float(np.diff(model.estimate(1, 0).tree_ms[[1, 8]])[0])
    total = 2.6 + 3.0 + nodes_ms
    # Verifies the last draft, whose time is unknown. No plain step has to follow.
    model.observe(StepTimes(8, 1, 0.0, True, False, 100.0, 100.0))
    for _ in range(60):
        model.observe(StepTimes(8, 1, 0.0, True, False, total, total, copies=True))
    after = model.estimate(1, 0)
    added = float(np.diff(after.tree_ms[[1, 8]])[0])
    assert after.copies_ms + added == pytest.approx(total, rel=0.05)
    assert after.plain_ms == pytest.approx(2.6)
    assert model.plain_age(1) == math.inf


def test_steps_of_copies_tell_costly_nodes_from_a_slow_machine():
    """Nodes that take twice what the table says must not make other steps look slow."""
    model, rng = CorrectedLatency(_table()), np.random.default_rng(0)
    before = model.estimate(1, 0)
    for _ in range(200):
        rows = int(rng.choice([1, 2, 8, 32]))
        base = before.copies_ms if rows > 1 else 2.6
        total = base + 2.0 * float(before.tree_ms[rows] - before.tree_ms[1])
        for _ in range(2):
            model.observe(StepTimes(rows, 1, 0.0, rows > 1, False, total, total, copies=rows > 1))
    after = model.estimate(1, 0)
    assert after.plain_ms == pytest.approx(2.6, rel=0.05)
    added = after.tree_ms[32] - after.tree_ms[1]
    assert added == pytest.approx(2.0 * (before.tree_ms[32] - before.tree_ms[1]), rel=0.15)


def test_the_first_step_of_a_kind_is_ignored():
    """The first trees may compile, and the first plain step after trees is slow."""
    model = CorrectedLatency(_table())
    before = model.estimate(1, 0)
    model.observe(_tree(8, 400.0))
    model.observe(_plain(400.0))
    assert model.estimate(1, 0) == before


def test_a_curve_is_the_same_object_until_its_shape_changes():
    model = CorrectedLatency(_table())
    _serve(model, 300, np.random.default_rng(4), noise=0.0)
    cost = model.estimate(1, 100)
    _serve(model, 40, np.random.default_rng(5), plain=1.05, noise=0.0, drafts=0.0)
    slower = model.estimate(1, 100)
    assert slower.curve is cost.curve and slower.factor > 1.02 * cost.factor
    assert slower.tree_step_ms(9) == pytest.approx(float(slower.tree_ms[9]))
    _serve(model, 40, np.random.default_rng(6), added=1.5)
    assert model.estimate(1, 100).curve is not cost.curve
    assert not model.estimate(1, 100).curve.flags.writeable
