# SPDX-License-Identifier: Apache-2.0
"""Linear calibration of the roofline against measured forward passes.

For each device and target, each branch is scaled by its own line, and the larger one is taken, as
in the paper:

    T(s, c) = max( a_m * Bytes / Bandwidth + b_m,  a_c * FLOPs / PeakFLOPs + b_c )

with all four coefficients >= 0, so the curve stays monotone and convex like the roofline. The
offsets cover what the roofline does not model: launches, host time, kernels that scale worse.

The fit is robust to stalled measurements (Cauchy loss) and weighted by size: the residual at s rows
is divided by 1 + 3 (s - s_min) / (s_max - s_min), because the budget is decided where rows are few
and large steps would otherwise dominate. (The paper's code has 30 instead of 3; with that, a single
outlier among the small sizes outweighs all large ones.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from vllm_bastion.policy.cost.devices import DeviceSpec
from vllm_bastion.policy.cost.forward_times import FloatArray
from vllm_bastion.policy.cost.roofline import ModelShape, Roofline

_SIGMA_SCALE = 3.0


@dataclass(frozen=True)
class CalibratedRoofline:
    """A roofline with a line for each branch; a `Carrier` for the step-cost table."""

    roofline: Roofline
    memory_slope: float
    memory_offset_ms: float
    compute_slope: float
    compute_offset_ms: float

    def predict_ms(
        self, rows: FloatArray | float, context_len: float, num_reqs: int = 1
    ) -> FloatArray:
        """Milliseconds of the target's forward pass, see `Roofline.predict_ms`."""
        memory = self.roofline.memory_ms(rows, context_len, num_reqs)
        compute = self.roofline.compute_ms(rows, context_len, num_reqs)
        return np.maximum(
            self.memory_slope * memory + self.memory_offset_ms,
            self.compute_slope * compute + self.compute_offset_ms,
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values for `json.dump`, including the shape and the device."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CalibratedRoofline:
        """Inverse of `to_json`.

        Raises:
            ValueError: an entry is missing, or a coefficient is not finite and >= 0.
        """
        try:
            roofline = Roofline(
                ModelShape(**data["roofline"]["shape"]), DeviceSpec(**data["roofline"]["device"])
            )
            names = ("memory_slope", "memory_offset_ms", "compute_slope", "compute_offset_ms")
            values = [float(data[name]) for name in names]
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a calibration: {error!r}") from error
        if not all(np.isfinite(value) and value >= 0 for value in values):
            raise ValueError(f"calibration coefficients must be finite and >= 0, got {values}")
        return cls(roofline, *values)


@dataclass(frozen=True)
class CalibrationReport:
    """A fit, and its error on grid points that were not fitted."""

    calibrated: CalibratedRoofline
    # root mean square error on the held-out points, ms
    rmse_before: float
    rmse_after: float
    num_fitted: int
    num_held_out: int

    @property
    def reduction(self) -> float:
        """1 - after / before (the paper reports 0.87 to 0.90, on its fitted points)."""
        return 1.0 - self.rmse_after / self.rmse_before if self.rmse_before > 0 else 0.0


def calibrate(roofline: Roofline, samples: Iterable[Sequence[float]]) -> CalibratedRoofline:
    """Fit both branches to measured forward passes.

    Args:
        roofline: the bare model.
        samples: `(rows, context_len, forward_ms[, num_reqs])`, as for `StepCostTable`; repeated
            points are reduced to their median.

    Raises:
        ValueError: there are no samples.
    """
    grid = _medians(samples)
    if not len(grid):
        raise ValueError("calibration needs at least one measured forward pass")
    return _fit(roofline, grid)


def calibrate_and_report(
    roofline: Roofline, samples: Iterable[Sequence[float]], *, held_out: int = 4
) -> CalibrationReport:
    """Fit all grid points except one in `held_out`, and report the error on the excepted ones.

    The coefficients are those of this fit, so that the error applies to them. A grid that is too
    small to split (fewer than two points held out, or fewer than three to fit) is fitted whole, and
    the error is that on all of it.
    """
    grid = _medians(samples)
    # shuffled with a fixed seed: every n-th of the sorted grid would hold out whole contexts
    order = np.random.default_rng(0).permutation(len(grid))
    test, train = grid[order[::held_out]], grid[np.sort(np.setdiff1d(order, order[::held_out]))]
    if len(test) < 2 or len(train) < 3:
        train = test = grid
    calibrated = _fit(roofline, train)
    return CalibrationReport(
        calibrated,
        rmse(roofline, test),
        rmse(calibrated, test),
        len(train),
        len(test) if test is not grid else 0,
    )


def rmse(model: Roofline | CalibratedRoofline, samples: Iterable[Sequence[float]]) -> float:
    """Unweighted root mean square error of `model` on samples, ms."""
    grid = _medians(samples)
    return float(np.sqrt(np.mean((_predict(model, grid) - grid[:, 2]) ** 2)))


def _fit(roofline: Roofline, grid: FloatArray) -> CalibratedRoofline:
    from scipy.optimize import least_squares

    rows, measured = grid[:, 0], grid[:, 2]
    memory = np.array([float(roofline.memory_ms(s, c, int(r))) for s, c, _, r in grid])
    compute = np.array([float(roofline.compute_ms(s, c, int(r))) for s, c, _, r in grid])
    spread = rows.max() - rows.min()
    sigma = 1.0 + _SIGMA_SCALE * (rows - rows.min()) / spread if spread else np.ones(len(rows))

    # The unknowns are scaled to be near one on every device: slopes by the measured over the
    # predicted level, offsets by the measured level.
    level = float(np.median(measured))
    scale = np.array(
        [level / np.median(memory), level, level / np.median(compute), level], dtype=np.float64
    )
    # residuals up to about this size are ordinary noise; larger ones are discounted
    noise = 0.05 * level

    def residuals(x: FloatArray) -> FloatArray:
        a_m, b_m, a_c, b_c = x * scale
        predicted = np.maximum(a_m * memory + b_m, a_c * compute + b_c)
        return np.asarray((predicted - measured) / (sigma * noise))

    # The maximum makes the problem non-convex: start from a line for each branch, and from one
    # branch alone, and take the best fit.
    compute_bound = compute > memory
    starts = [
        _line(memory, measured, sigma, ~compute_bound)
        + _line(compute, measured, sigma, compute_bound),
        (*_line(memory, measured, sigma, ~compute_bound), 0.0, 0.0),
        (*_line(memory, measured, sigma, rows >= 0), 0.0, 0.0),
        (0.0, 0.0, *_line(compute, measured, sigma, rows >= 0)),
    ]
    fits = []
    for start in starts:
        x = np.maximum(np.array(start) / scale, 1e-6)
        # Soft L1 gets close from a bad start. Cauchy then ignores the outliers, which soft L1 only
        # discounts: one stalled measurement of a small step would outweigh all large ones.
        for loss in ("soft_l1", "cauchy"):
            fit = least_squares(residuals, x, bounds=(0.0, np.inf), loss=loss)
            x = fit.x
        fits.append(fit)
    best = min(fits, key=lambda fit: float(fit.cost))
    return CalibratedRoofline(roofline, *(float(v) for v in best.x * scale))


def _line(x: FloatArray, y: FloatArray, sigma: FloatArray, where: Any) -> tuple[float, float]:
    """Non-negative slope and offset of a weighted line through the points of one branch."""
    from scipy.optimize import nnls

    if not np.any(where):
        return 0.0, 0.0
    design = np.stack([x, np.ones_like(x)], axis=1)[where] / sigma[where, None]
    solution, _ = nnls(design, y[where] / sigma[where])
    return float(solution[0]), float(solution[1])


def _predict(model: Roofline | CalibratedRoofline, grid: FloatArray) -> FloatArray:
    return np.array([float(model.predict_ms(s, c, int(r))) for s, c, _, r in grid])


def _medians(samples: Iterable[Sequence[float]]) -> FloatArray:
    """[M, 4] float64 rows, context, median ms, requests: one row per grid point, sorted."""
    groups: dict[tuple[float, float, float], list[float]] = {}
    for rows, context, ms, *rest in samples:
        groups.setdefault((rows, context, rest[0] if rest else 1), []).append(ms)
    grid = [(s, c, float(np.median(groups[s, c, r])), r) for s, c, r in sorted(groups)]
    return np.array(grid, dtype=np.float64).reshape(-1, 4)
