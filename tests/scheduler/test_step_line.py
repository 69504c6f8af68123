# SPDX-License-Identifier: Apache-2.0
"""The line through measured step times, against NumPy's."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_bastion.scheduler.step_line import StepLine


def test_it_is_the_least_squares_line_of_steps_that_differ() -> None:
    """25 steps weigh the same; the pull of the slope towards 1 vanishes as predictions spread."""
    rng = np.random.default_rng(0)
    predicted = rng.uniform(1.0, 100.0, 25)
    ms = 1.4 * predicted + 5.0 + rng.normal(0.0, 1.0, 25)
    line = StepLine()
    for x, y in zip(predicted, ms, strict=True):
        line.add(float(x), float(y))
    slope, offset = np.polyfit(predicted, ms, 1)
    assert line() == (pytest.approx(slope, abs=0.02), pytest.approx(offset, abs=1.0))


def test_the_slope_is_one_while_predictions_are_alike() -> None:
    line = StepLine()
    assert line() == (1.0, 0.0)
    for ms in (14.0, 16.0) * 20:
        line.add(10.0, ms)
    slope, offset = line()
    assert slope == 1.0 and offset == pytest.approx(5.0, abs=0.2)


def test_recent_steps_count() -> None:
    line = StepLine()
    for slope in (1.0, 1.8):
        for i in range(300):
            x = 10.0 + 5 * (i % 20)
            line.add(x, slope * x)
    assert line()[0] == pytest.approx(1.8, abs=0.05)


def test_slopes_have_limits() -> None:
    for slope, most in ((9.0, 2.0), (-3.0, 0.5)):
        line = StepLine()
        for x in range(1, 40):
            line.add(float(x), 100.0 + slope * x)
        assert line()[0] == most
