# SPDX-License-Identifier: Apache-2.0
"""Corrects the step times of the profile at start-up by measured ones. Imports no vLLM."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# EMA weight of a step; weight of the prior slope 1, as a variance of the predictions over their
# squared mean; limits of the slope.
_WEIGHT, _PRIOR, _SLOPES = 0.04, 0.005, (0.5, 2.0)
# A step costs at least this share of what the profile predicts.
_LEAST = 0.5


def corrected(predicted_ms: NDArray[np.float64], line: tuple[float, float]) -> NDArray[np.float64]:
    """A profile's times, of any shape, corrected by a `StepLine`'s slope and offset."""
    slope, offset = line
    return np.maximum(slope * predicted_ms + offset, _LEAST * predicted_ms)


class StepLine:
    """Measured ms of recent steps over predicted ms: their least squares line.

    Its slope stays near 1 while predictions are alike, as with a fixed number of nodes.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._predicted = self._ms = 0.0  # means
        self._variance = self._covariance = 0.0

    def add(self, predicted_ms: float, ms: float) -> None:
        """Observe a step that took `ms`."""
        self._steps += 1
        weight = max(1.0 / self._steps, _WEIGHT)
        x, y = predicted_ms - self._predicted, ms - self._ms
        self._predicted += weight * x
        self._ms += weight * y
        self._variance = (1.0 - weight) * (self._variance + weight * x * x)
        self._covariance = (1.0 - weight) * (self._covariance + weight * x * y)

    def __call__(self) -> tuple[float, float]:
        """Slope and offset in ms; (1, 0) before the first step."""
        if not self._steps:
            return 1.0, 0.0
        prior = _PRIOR * self._predicted**2
        slope = (self._covariance + prior) / (self._variance + prior)
        slope = min(max(slope, _SLOPES[0]), _SLOPES[1])
        return slope, self._ms - slope * self._predicted
