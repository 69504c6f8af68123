# SPDX-License-Identifier: Apache-2.0
"""Calibration recovers known coefficients, survives outliers and is judged on unseen points."""

import numpy as np
import pytest

from vllm_bastion.policy.cost.devices import DeviceSpec
from vllm_bastion.policy.cost.paper import (
    CalibratedRoofline,
    ModelShape,
    Roofline,
    calibrate,
    calibrate_and_report,
    rmse,
)

QWEN3_8B = ModelShape(36, 4096, 32, 8, 128, 12288, 151936)
A100 = Roofline(QWEN3_8B, DeviceSpec("A100", 312e12, 1935e9, "test"))
ROWS = [1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512]
CONTEXTS = [64, 256, 1024, 4096]
TRUTH = CalibratedRoofline(A100, 1.4, 3.0, 1.9, 6.0)


def _grid(noise=0.0, seed=0):
    rng = np.random.default_rng(seed)
    return [
        (s, c, float(TRUTH.predict_ms(s, c)) * (1 + noise * rng.standard_normal()))
        for s in ROWS
        for c in CONTEXTS
    ]


def test_both_branches_are_recovered():
    fitted = calibrate(A100, _grid())
    assert fitted.memory_slope == pytest.approx(1.4, rel=0.02)
    assert fitted.memory_offset_ms == pytest.approx(3.0, rel=0.1)
    assert fitted.compute_slope == pytest.approx(1.9, rel=0.02)
    assert fitted.compute_offset_ms == pytest.approx(6.0, rel=0.1)


def test_outliers_are_outvoted():
    samples = _grid(noise=0.01)
    for index, factor in ((3, 20.0), (17, 8.0), (30, 50.0), (41, 0.05)):
        s, c, ms = samples[index]
        samples[index] = (s, c, ms * factor)
    fitted = calibrate(A100, samples)
    clean = np.array([float(TRUTH.predict_ms(s, c)) for s, c, _ in samples])
    got = np.array([float(fitted.predict_ms(s, c)) for s, c, _ in samples])
    assert np.median(np.abs(got / clean - 1)) < 0.03
    assert np.max(np.abs(got / clean - 1)) < 0.15


def test_error_is_reported_on_points_that_were_not_fitted():
    report = calibrate_and_report(A100, _grid(noise=0.02))
    assert report.num_held_out == len(ROWS) * len(CONTEXTS) // 4
    assert report.num_fitted + report.num_held_out == len(ROWS) * len(CONTEXTS)
    # the bare roofline is off by a third or more here
    assert report.reduction > 0.87
    assert report.rmse_after < report.rmse_before


def test_an_overfit_would_show_in_the_held_out_error():
    # times that have nothing to do with rows or context cannot be predicted
    rng = np.random.default_rng(0)
    noise = [(s, c, 20 + 30 * rng.random()) for s in ROWS for c in CONTEXTS]
    report = calibrate_and_report(A100, noise)
    assert report.rmse_after > 5.0


def test_a_grid_of_one_branch_leaves_a_usable_curve():
    memory_bound = [(s, c, ms) for s, c, ms in _grid() if s <= 32]
    fitted = calibrate(A100, memory_bound)
    assert rmse(fitted, memory_bound) < 0.05
    curve = fitted.predict_ms(np.arange(1, 1025, dtype=float), 256)
    assert np.isfinite(curve).all() and (curve > 0).all() and (np.diff(curve) >= 0).all()


def test_calibrated_curve_stays_convex_and_monotone():
    fitted = calibrate(A100, _grid(noise=0.05, seed=3))
    for context in (0, 1000, 50_000):
        curve = fitted.predict_ms(np.arange(1, 2049, dtype=float), context)
        assert (np.diff(curve) >= 0).all() and (np.diff(curve, 2) > -1e-9).all()


def test_an_engine_dominated_by_overhead_is_a_constant():
    samples = [(s, c, 90.0 + 0.001 * s) for s in ROWS for c in CONTEXTS]
    report = calibrate_and_report(A100, samples)
    assert report.rmse_after < 0.2 and report.reduction > 0.87


def test_small_steps_weigh_more_than_large_ones():
    # falling times cannot be fitted by a rising curve: the best constant is a weighted mean, which
    # must lie nearer to what the small steps cost
    samples = [(s, 64, 20.4 if s <= 4 else 20.0) for s in (1, 2, 3, 4, 29, 30, 31, 32)]
    fitted = calibrate(A100, samples)
    assert 20.3 < float(fitted.predict_ms(16, 64)) < 20.4


def test_one_point_and_no_point():
    fitted = calibrate(A100, [(8, 64, 33.0)])
    assert float(fitted.predict_ms(8, 64)) == pytest.approx(33.0, rel=0.01)
    report = calibrate_and_report(A100, [(8, 64, 33.0), (16, 64, 34.0)])
    assert report.num_held_out == 0
    with pytest.raises(ValueError, match="at least one"):
        calibrate(A100, [])
