# SPDX-License-Identifier: Apache-2.0
"""The paper's estimators of a step's cost, and the roofline that they start from.

The appendix "Analytical Cost Modeling", term by term, for s new tokens over c cached ones:

    FLOPs = L (4 s h h_q + 4 s h h_kv + 4 s (c + s) h_q + 6 s h h_ffn) + 2 s h V
    Bytes = bp [ 2 V h + s (h + V) + L ( 2 h (h_q + h_kv) + 3 h h_ffn + 2 h_kv (c + 2 s)
                                         + 4 s (h + h_q + h_ffn) + 2 n_q s (c + s) ) ]
    R(s, c) = max(FLOPs / PeakFLOPs, Bytes / Bandwidth)

with h_q = n_q d and h_kv = n_kv d, a multiply-add as 2 FLOPs, attention unfused, and a tied
embedding counted twice because it is read at two stages.

Two extensions reduce to the paper's formula for R = 1 and tp = 1. With R requests the rows are
divided evenly: s (c + s) becomes s (c + s / R), and the cached context is read once per request.
With tensor parallelism `tp` each rank has 1 / tp of the heads, the FFN and the vocabulary, while
activations of width h are replicated. If there are fewer key/value heads than `tp`, they are
replicated too, as in vLLM.

Linear calibration scales each branch by its own line, for each device and target:

    T(s, c) = max( a_m * Bytes / Bandwidth + b_m,  a_c * FLOPs / PeakFLOPs + b_c )

with all four coefficients >= 0, so the curve stays monotone and convex like the roofline. The
offsets cover what the roofline does not model: launches, host time, kernels that scale worse.

The estimators, each at the padded size and plus T_draft + T_aux:

    static     calibrated roofline
    ema        bare roofline, times c
    ema_calib  calibrated roofline, times c

c is the paper's moving average of the target's observed over predicted forward time. It scales all
steps alike, so it cannot change which tree size is best.

The calibrated roofline also extrapolates the measured table to longer contexts (`ForwardTimes`),
and the bare one stands in for a table that was not measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from vllm_bastion.policy.cost.devices import DeviceSpec
from vllm_bastion.policy.cost.forward_times import Carrier, FloatArray
from vllm_bastion.policy.cost.latency import StepEstimate
from vllm_bastion.policy.cost.table import (
    MAX_CACHED,
    StepCostTable,
    bucket_context,
    context_bucket,
)
from vllm_bastion.step_times import StepTimes

Rows = FloatArray | float


# ---- the roofline -----------------------------------------------------------------------


@dataclass(frozen=True)
class ModelShape:
    """The sizes that the cost model needs, in the paper's notation."""

    num_layers: int  # L
    hidden: int  # h
    num_heads: int  # n_q
    num_kv_heads: int  # n_kv
    head_dim: int  # d
    ffn: int  # h_ffn
    vocab: int  # V
    bytes_per_element: float = 2.0  # bp
    tp: int = 1

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any] | Any, *, bytes_per_element: float = 2.0, tp: int = 1
    ) -> ModelShape:
        """From a Hugging Face config of a dense decoder (object or dict).

        `head_dim` is derived if the config has none, `num_key_value_heads` defaults to the number
        of query heads, and of a multimodal config the `text_config` is used.

        Raises:
            ValueError: the entry named in the message is missing or not a positive integer.
        """
        inner = _entry(config, "text_config")
        config = config if inner is None else inner
        heads = _positive(config, "num_attention_heads")
        hidden = _positive(config, "hidden_size")
        return cls(
            num_layers=_positive(config, "num_hidden_layers"),
            hidden=hidden,
            num_heads=heads,
            num_kv_heads=int(_entry(config, "num_key_value_heads") or heads),
            head_dim=int(_entry(config, "head_dim") or hidden // heads),
            ffn=_positive(config, "intermediate_size"),
            vocab=_positive(config, "vocab_size"),
            bytes_per_element=bytes_per_element,
            tp=tp,
        )

    @property
    def _sharded(self) -> tuple[float, float, float, float, float]:
        """n_q, h_q, h_kv, h_ffn, V of one rank."""
        kv_heads = max(self.num_kv_heads / self.tp, 1.0)
        heads = self.num_heads / self.tp
        widths = heads * self.head_dim, kv_heads * self.head_dim
        return heads, *widths, self.ffn / self.tp, self.vocab / self.tp

    def flops(self, rows: Rows, context_len: float, num_reqs: int = 1) -> FloatArray:
        """FLOPs of one rank for `rows` new tokens over `context_len` cached ones per request."""
        s = np.asarray(rows, dtype=np.float64)
        c, h = float(context_len), float(self.hidden)
        _, h_q, h_kv, h_ffn, vocab = self._sharded
        attended = s * (c + s / num_reqs)
        per_layer = 4 * s * h * h_q + 4 * s * h * h_kv + 4 * attended * h_q + 6 * s * h * h_ffn
        return np.asarray(self.num_layers * per_layer + 2 * s * h * vocab)

    def bytes_moved(self, rows: Rows, context_len: float, num_reqs: int = 1) -> FloatArray:
        """Bytes that one rank moves for the same pass."""
        s = np.asarray(rows, dtype=np.float64)
        c, h = float(context_len), float(self.hidden)
        n_q, h_q, h_kv, h_ffn, vocab = self._sharded
        attended = s * (c + s / num_reqs)
        weights = 2 * h * (h_q + h_kv) + 3 * h * h_ffn
        cache = 2 * h_kv * (c * num_reqs + 2 * s)
        activations = 4 * s * (h + h_q + h_ffn) + 2 * n_q * attended
        in_layers = self.num_layers * (weights + cache + activations)
        return np.asarray(self.bytes_per_element * (2 * vocab * h + s * (h + vocab) + in_layers))


def _entry(config: Mapping[str, Any] | Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _positive(config: Mapping[str, Any] | Any, name: str) -> int:
    value = _entry(config, name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"config entry {name!r} must be a positive integer, got {value!r}")
    return value


@dataclass(frozen=True)
class Roofline:
    """R(s, c): the bare prediction, in milliseconds. A `Carrier`."""

    shape: ModelShape
    device: DeviceSpec

    def branches_ms(
        self, rows: Rows, context_len: float, num_reqs: int = 1
    ) -> tuple[FloatArray, FloatArray]:
        """Bytes / Bandwidth, and FLOPs / PeakFLOPs."""
        of = rows, context_len, num_reqs
        memory = self.shape.bytes_moved(*of) / self.device.bandwidth * 1e3
        return memory, self.shape.flops(*of) / self.device.peak_flops * 1e3

    def predict_ms(self, rows: Rows, context_len: float, num_reqs: int = 1) -> FloatArray:
        """The larger of the two."""
        return np.maximum(*self.branches_ms(rows, context_len, num_reqs))


# ---- linear calibration -----------------------------------------------------------------


@dataclass(frozen=True)
class CalibratedRoofline:
    """A roofline with a line for each branch. A `Carrier`."""

    roofline: Roofline
    memory_slope: float
    memory_offset_ms: float
    compute_slope: float
    compute_offset_ms: float

    def predict_ms(self, rows: Rows, context_len: float, num_reqs: int = 1) -> FloatArray:
        """Milliseconds of the target's forward pass."""
        memory, compute = self.roofline.branches_ms(rows, context_len, num_reqs)
        return np.maximum(
            self.memory_slope * memory + self.memory_offset_ms,
            self.compute_slope * compute + self.compute_offset_ms,
        )


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


def _fit(roofline: Roofline, grid: FloatArray) -> CalibratedRoofline:
    """A fit that is robust to stalled measurements (Cauchy loss) and weighted by size.

    The residual at s rows is divided by 1 + 3 (s - s_min) / (s_max - s_min), because the budget is
    decided where rows are few and large steps would otherwise dominate. (The paper's code has 30
    instead of 3; with that, a single outlier among the small sizes outweighs all large ones.)
    """
    from scipy.optimize import least_squares

    rows, measured = grid[:, 0], grid[:, 2]
    branches = np.array([roofline.branches_ms(s, c, int(r)) for s, c, _, r in grid])
    memory, compute = branches.T
    spread = rows.max() - rows.min()
    sigma = 1.0 + 3.0 * (rows - rows.min()) / spread if spread else np.ones(len(rows))

    # The unknowns are scaled to be near one on every device: slopes by the measured over the
    # predicted level, offsets by the measured level.
    level = float(np.median(measured))
    scale = np.array([level / np.median(memory), level, level / np.median(compute), level])
    # residuals up to about this size are ordinary noise; larger ones are discounted
    noise = 0.05 * level

    def residuals(x: FloatArray) -> FloatArray:
        a_m, b_m, a_c, b_c = x * scale
        predicted = np.maximum(a_m * memory + b_m, a_c * compute + b_c)
        return np.asarray((predicted - measured) / (sigma * noise))

    def line(of: FloatArray, where: Any) -> tuple[float, float]:
        return _line(of[where], measured[where], sigma[where])

    # The maximum makes the problem non-convex: start from a line for each branch, and from one
    # branch alone, and take the best fit.
    compute_bound, everywhere = compute > memory, slice(None)
    starts = [
        (*line(memory, ~compute_bound), *line(compute, compute_bound)),
        (*line(memory, ~compute_bound), 0.0, 0.0),
        (*line(memory, everywhere), 0.0, 0.0),
        (0.0, 0.0, *line(compute, everywhere)),
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


def _line(x: FloatArray, y: FloatArray, sigma: FloatArray) -> tuple[float, float]:
    """Non-negative slope and offset of a weighted line; 0 without points."""
    from scipy.optimize import nnls

    if not len(x):
        return 0.0, 0.0
    design = np.stack([x, np.ones_like(x)], axis=1) / sigma[:, None]
    solution, _ = nnls(design, y / sigma)
    return float(solution[0]), float(solution[1])


def _medians(samples: Iterable[Sequence[float]]) -> FloatArray:
    """[M, 4] float64 rows, context, median ms, requests: one row per grid point, sorted."""
    groups: dict[tuple[float, float, float], list[float]] = {}
    for rows, context, ms, *rest in samples:
        groups.setdefault((rows, context, rest[0] if rest else 1), []).append(ms)
    grid = [(s, c, float(np.median(groups[s, c, r])), r) for s, c, r in sorted(groups)]
    return np.array(grid, dtype=np.float64).reshape(-1, 4)


# ---- the estimators ---------------------------------------------------------------------

# Costs are rebuilt when ln c has changed by this much. Callers copy a new array to the device, for
# which smaller changes matter too little.
_LOG_STEP = 0.01
_ALPHA = 0.1  # of the moving average


class CurveLatency:
    """All models but `ema_table`: forward times, with the paper's correction or without.

    Args:
        table: drafter time, T_aux and graph sizes.
        curve: the bare or the calibrated roofline; None for the table as it was measured.
        online: whether real steps correct the curve.
    """

    def __init__(
        self, table: StepCostTable, curve: Carrier | None = None, *, online: bool = False
    ) -> None:
        self.table, self.curve = table, curve
        # c; None if it stays 1.
        self.factor: float | None = 1.0 if online else None
        self._seen: set[int] = set()
        self._forward_ms = lru_cache(MAX_CACHED)(self._make_forward_ms)
        self._estimate = lru_cache(MAX_CACHED)(self._make_estimate)

    def estimate(self, num_reqs: int, context_len: float, spared: int = 0) -> StepEstimate:
        """See `LatencyModel`."""
        if self.curve is None:
            return self.table.estimate(num_reqs, context_len, spared)
        log_c = 0 if self.factor is None else round(math.log(self.factor) / _LOG_STEP)
        return self._estimate(max(1, int(num_reqs)), context_bucket(context_len), spared, log_c)

    def _make_estimate(self, num_reqs: int, bucket: int, spared: int, log_c: int) -> StepEstimate:
        forward = self._forward_ms(num_reqs, bucket) * math.exp(_LOG_STEP * log_c)
        return self.table.whole_step(forward, num_reqs, spared)

    def _make_forward_ms(self, num_reqs: int, bucket: int) -> FloatArray:
        """[max_rows + 1] float64: the uncorrected curve at the padded sizes."""
        assert self.curve is not None
        rows = self.table.padded_rows
        curve = self.curve.predict_ms(rows, bucket_context(bucket), num_reqs)
        return np.maximum.accumulate(curve)

    def observe(self, step: StepTimes, passed: int = 1) -> None:
        """See `LatencyModel`. The first use of a padded size may compile, and does not count."""
        if self.factor is None or not step.verified:
            return
        row = min(max(step.rows, 1), self.table.max_rows)
        size = int(self.table.padded_rows[row])
        predicted = self._forward_ms(max(1, step.num_reqs), context_bucket(step.context_len))[row]
        ratio = step.forward_ms / float(predicted)
        if not (math.isfinite(ratio) and ratio > 0):
            return
        if size not in self._seen:
            self._seen.add(size)
            # A bare roofline can be far off: start from the observed ratio, not from one.
            self.factor = ratio if len(self._seen) == 1 else self.factor
            return
        self.factor += _ALPHA * (ratio - self.factor)

    def plain_age(self, num_reqs: int) -> float:
        """See `LatencyModel`: no model here learns from plain steps."""
        return 0.0

    def correction(self, num_reqs: int) -> dict[str, float]:
        """See `LatencyModel`."""
        return {} if self.factor is None else {"tree": self.factor}
