# SPDX-License-Identifier: Apache-2.0
"""How the times of whole steps correct their calibrated cost: a Kalman filter.

Calibration gives a prior for a batch of R requests: P, the time of a plain step, and C(n), that of
a step with trees and n target rows. It runs without a scheduler and on a machine that may change
later. The time of a whole step, from the end of the step before it, is modelled as

    plain step           e^l P
    step with trees      e^(l + a) (C(R) + e^s (C(n) - C(R)))

The level l is common to both kinds, so that either kind shows that the machine changed. The arm a
is what steps with trees take beyond that, the slope s what rows beyond the roots do. The state
(l, a, s) has a covariance. An observed step adds the innovation y = ln(measured / predicted) by

    H = (1, 0, 0) or (1, 1, f)          f = the fraction of the predicted time that e^s scales
    K = S H' / (H S H' + r)             S = the covariance, r = the variance of one step's time
    state += K y,  S -= K H S           y clipped to two of its standard deviations

If y is larger, S decreases by less, as if r were so large that y is two standard deviations: one
stalled step must not make the filter certain of what it showed. Between two observations S grows
by Q a step: what has not been seen for long is not known well. With r = 0.1^2 and Q = 0.01^2, K of
the level settles at 0.1, the alpha of the paper's moving average. The arm and the slope depend less
on the machine, and follow more slowly.

The standard deviation of a is how well the two kinds of step can be compared; the gate explores
by it.
"""

from __future__ import annotations

import math

# Standard deviations of logarithms: of one step's time,
NOISE = 0.1
# of (l, a, s) before the first step,
_PRIOR = (0.5, 0.3, 0.2)
# of how they differ between two sizes of batch,
_OTHER_SIZE = (0.5, 0.1, 0.1)
# and of what they change by in one step.
_DRIFT = (0.01, 0.003, 0.003)
_CLIP = 2.0  # an innovation counts as at most this many of its standard deviations
_MAX_SLOPE = math.log(3.0)


class StepFilter:
    """The state (l, a, s) of batches of one size, in powers of two.

    Plain Python numbers, because it is updated in every step.
    """

    def __init__(self, like: StepFilter | None = None) -> None:
        # A new size starts from what is known of another one, and a little less certain.
        self._state: list[float] = [0.0, 0.0, 0.0] if like is None else like._state.copy()
        self._covariance = [[0.0] * 3 for _ in range(3)]
        for i, (prior, differs) in enumerate(zip(_PRIOR, _OTHER_SIZE, strict=True)):
            known = prior**2 if like is None else like._covariance[i][i] + differs**2
            self._covariance[i][i] = min(known, prior**2)

    @property
    def level(self) -> float:
        """ln of a plain step's time over its prior."""
        return self._state[0]

    @property
    def tree(self) -> float:
        """ln of a tree step's time over its prior, with one row for each request."""
        return self._state[0] + self._state[1]

    @property
    def slope(self) -> float:
        """ln of what further rows add, over the prior and beyond `tree`."""
        return self._state[2]

    @property
    def ratio_sd(self) -> float:
        """Standard deviation of `tree` - `level`."""
        return math.sqrt(max(0.0, self._covariance[1][1]))

    def age(self, steps: int) -> None:
        """`steps` steps went by since the last observation."""
        for i, (drift, prior) in enumerate(zip(_DRIFT, _PRIOR, strict=True)):
            # It never grows beyond the prior's.
            variance = self._covariance[i][i]
            self._covariance[i][i] = max(variance, min(variance + steps * drift**2, prior**2))

    def observe_plain(self, prior_ms: float, measured_ms: float) -> None:
        """Learn from a plain step: P, and what it took."""
        self._observe(0.0, 0.0, prior_ms * math.exp(self.level), measured_ms)

    def observe_tree(self, root_ms: float, added_ms: float, measured_ms: float) -> None:
        """Learn from a step with trees: C(R), C(n) - C(R), and what it took."""
        added = math.exp(self.slope) * added_ms
        predicted = math.exp(self.tree) * (root_ms + added)
        self._observe(1.0, added / (root_ms + added), predicted, measured_ms)

    def _observe(
        self, on_arm: float, on_slope: float, predicted_ms: float, measured_ms: float
    ) -> None:
        """Learn by H = (1, on_arm, on_slope)."""
        if not (math.isfinite(measured_ms) and measured_ms > 0):
            return
        (c00, c01, c02), (_, c11, c12), (_, _, c22) = self._covariance
        # S H'
        t0 = c00 + c01 * on_arm + c02 * on_slope
        t1 = c01 + c11 * on_arm + c12 * on_slope
        t2 = c02 + c12 * on_arm + c22 * on_slope
        variance = t0 + t1 * on_arm + t2 * on_slope + NOISE**2
        k0, k1, k2 = t0 / variance, t1 / variance, t2 / variance
        limit = _CLIP * math.sqrt(variance)
        surprise = math.log(measured_ms / predicted_ms)
        innovation = min(max(surprise, -limit), limit)
        level, arm, slope = self._state
        slope = min(max(slope + k2 * innovation, -_MAX_SLOPE), _MAX_SLOPE)
        self._state = [level + k0 * innovation, arm + k1 * innovation, slope]
        # See the module docstring: (limit / surprise)^2 is the variance over the larger one.
        shrink = min(1.0, (limit / surprise) ** 2) if surprise else 1.0
        k0, k1, k2 = shrink * k0, shrink * k1, shrink * k2
        c00, c01, c02 = c00 - k0 * t0, c01 - k0 * t1, c02 - k0 * t2
        c11, c12, c22 = c11 - k1 * t1, c12 - k1 * t2, c22 - k2 * t2
        self._covariance = [[c00, c01, c02], [c01, c11, c12], [c02, c12, c22]]
