# SPDX-License-Identifier: Apache-2.0
"""What one decoding step costs by its target rows, from measurements.

One cycle of speculative decoding costs (the paper's equation for C(N))

    C(n) = T_verify(n, c) + T_draft(R) + T_aux

with n the target's rows in the step (roots, draft nodes and prefill tokens together), c the mean
number of cached tokens per request and R the requests of the batch. With CUDA graphs a step of n
rows is padded to the next captured size and costs what that size costs, so T_verify is a staircase
over the captured sizes. Without graphs the measured points (`ForwardTimes`) are interpolated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np

from vllm_bastion.policy.cost.forward_times import Carrier, FloatArray, ForwardTimes, Sample
from vllm_bastion.policy.cost.latency import CostArray, StepEstimate

# Results are cached per (requests, context bucket). Buckets are even in log(_SHORT + context), so a
# bucket's context is at most 6 % of that off. The context affects only the attention's part of a
# step, which is small for the first tokens; with finer buckets, short answers would cross one in
# every step, and each crossing copies a cost array to the device.
_BUCKETS_PER_DOUBLING = 6
_SHORT = 64.0
MAX_CACHED = 512
_MIN_MS = 1e-6


class StepCostTable:
    """Milliseconds of a step by target rows, requests and context.

    Args:
        samples: measured forward passes, `(target_rows, context_len, forward_ms[, num_reqs])`.
            context_len is the mean of cached tokens per request; num_reqs defaults to 1. Repeated
            points are reduced to their median.
        drafter_samples: measured drafter passes, `(num_reqs, drafter_ms)`; empty: no drafter time.
        aux_ms: constant time of a cycle that is neither (sampling, tree building, compaction).
        max_rows: most target rows of a step.
        captured_sizes: sizes of the CUDA graphs. A step is padded to the next size; beyond the
            largest it runs unpadded. Empty: no graphs.
        plain_aux_ms: `aux_ms` of a step that drafts nothing; default: `aux_ms`.
        carrier: latency curve that extrapolates beyond the measured contexts.
        position_samples: ms that a drafter pass saves per position left out, `(num_reqs, ms)`;
            empty: none.

    Raises:
        ValueError: no samples, or a value that is not finite and positive.
    """

    def __init__(
        self,
        samples: Iterable[Sequence[float]],
        drafter_samples: Iterable[Sequence[float]] = (),
        aux_ms: float = 0.0,
        *,
        max_rows: int,
        captured_sizes: Sequence[int] = (),
        plain_aux_ms: float | None = None,
        carrier: Carrier | None = None,
        position_samples: Iterable[Sequence[float]] = (),
    ) -> None:
        self.max_rows = int(max_rows)
        if self.max_rows < 1:
            raise ValueError(f"max_rows must be at least 1, got {max_rows}")
        self.samples = _checked_samples(samples)
        self.drafter_samples = _checked_drafter(drafter_samples)
        self.position_samples = _checked_drafter(position_samples, or_zero=True)
        self.aux_ms = _checked_aux("aux_ms", aux_ms)
        self.plain_aux_ms = _checked_aux(
            "plain_aux_ms", aux_ms if plain_aux_ms is None else plain_aux_ms
        )
        self.captured_sizes = tuple(sorted({int(size) for size in captured_sizes}))
        if self.captured_sizes and self.captured_sizes[0] < 1:
            raise ValueError(f"captured sizes must be positive, got {self.captured_sizes[0]}")
        self.carrier = carrier
        self._times = ForwardTimes(self.samples, carrier)
        # [max_rows + 1] float64: rows that the target computes in a step of n rows
        self.padded_rows = padded_rows(self.max_rows, self.captured_sizes)
        self._estimate = lru_cache(MAX_CACHED)(self._make_estimate)

    # ---- constructors for tests --------------------------------------------------------------

    @classmethod
    def flat(
        cls, ms: float = 1.0, *, max_rows: int, drafter_ms: float = 0.0, aux_ms: float = 0.0
    ) -> StepCostTable:
        """Every forward pass costs `ms`, so that draft nodes are free."""
        return cls.linear(ms, 0.0, max_rows=max_rows, drafter_ms=drafter_ms, aux_ms=aux_ms)

    @classmethod
    def linear(
        cls,
        base_ms: float,
        per_row_ms: float,
        *,
        max_rows: int,
        drafter_ms: float = 0.0,
        aux_ms: float = 0.0,
        captured_sizes: Sequence[int] = (),
    ) -> StepCostTable:
        """A forward pass of n rows costs `base_ms + per_row_ms * n`."""
        top = max(max_rows, *captured_sizes, 2)
        points = sorted({1, top, *captured_sizes})
        return cls(
            [(n, 0, base_ms + per_row_ms * n) for n in points],
            [(1, drafter_ms)] if drafter_ms > 0 else (),
            aux_ms,
            max_rows=max_rows,
            captured_sizes=captured_sizes,
        )

    # ---- queries -----------------------------------------------------------------------------

    def estimate(self, num_reqs: int, context_len: float, spared: int = 0) -> StepEstimate:
        """The costs of a step of either kind, as in `LatencyModel`; shared between calls."""
        return self._estimate(max(1, int(num_reqs)), context_bucket(context_len), spared)

    def _make_estimate(self, num_reqs: int, bucket: int, spared: int) -> StepEstimate:
        forward = self.forward_ms(num_reqs, bucket_context(bucket))
        return self.whole_step(forward, num_reqs, spared)

    def whole_step(self, forward_ms: FloatArray, num_reqs: int, spared: int = 0) -> StepEstimate:
        """The costs of a step from those of the forward pass, [max_rows + 1] by target rows."""
        curve = (forward_ms + self.drafter_ms(num_reqs, spared) + self.aux_ms).astype(np.float32)
        curve.setflags(write=False)
        root_ms = float(forward_ms[min(num_reqs, self.max_rows)])
        # Copies are grown, verified and walked like drafts.
        return StepEstimate(curve, root_ms + self.plain_aux_ms, root_ms + self.aux_ms)

    def cost_ms(self, num_reqs: int, context_len: float) -> CostArray:
        """[max_rows + 1] float32 ms of a step with trees by target rows, see `StepEstimate`."""
        return self.estimate(num_reqs, context_len).curve

    def plain_ms(self, num_reqs: int, context_len: float) -> float:
        """Milliseconds of a step of `num_reqs` rows that neither drafts nor verifies."""
        return self.estimate(num_reqs, context_len).plain_ms

    def forward_ms(self, num_reqs: int, context_len: float) -> FloatArray:
        """[max_rows + 1] float64 ms of the target's forward pass alone, by total target rows."""
        num_reqs, context = max(1, int(num_reqs)), bucket_context(context_bucket(context_len))
        at_points = self._times.ms(num_reqs, num_reqs * context)
        by_row = _interpolate(self.padded_rows, self._times.rows, at_points)
        return np.maximum(np.maximum.accumulate(by_row), _MIN_MS)

    def drafter_ms(self, num_reqs: int, spared: int = 0) -> float:
        """Milliseconds of one drafter pass over `num_reqs` requests; 0 where none was measured.

        spared: positions at the end of its block that the drafter does not predict.
        """
        saved = spared * _by_requests(self.position_samples, num_reqs)
        return max(0.0, _by_requests(self.drafter_samples, num_reqs) - saved)


def context_bucket(context_len: float) -> int:
    """Bucket of a mean context length; contexts of a bucket share a cached result."""
    return round(_BUCKETS_PER_DOUBLING * math.log2(1.0 + max(0.0, float(context_len)) / _SHORT))


def bucket_context(bucket: int) -> float:
    """The context length that represents `bucket`; an inverse of `context_bucket`."""
    return float(_SHORT * (2.0 ** (bucket / _BUCKETS_PER_DOUBLING) - 1.0))


def padded_rows(max_rows: int, captured_sizes: Sequence[int]) -> FloatArray:
    """[max_rows + 1] rows that the target computes in a step of n rows, padding included."""
    rows = np.maximum(np.arange(max_rows + 1, dtype=np.float64), 1.0)
    if not captured_sizes:
        return rows
    sizes = np.array(captured_sizes, dtype=np.float64)
    index = np.searchsorted(sizes, rows)
    fits = index < len(sizes)
    return np.where(fits, sizes[np.minimum(index, len(sizes) - 1)], rows)


def _interpolate(x: FloatArray, points: FloatArray, values: FloatArray) -> FloatArray:
    """Piecewise linear; constant below the first point, and above the last one its slope or 0."""
    out = np.interp(x, points, values)
    if len(points) > 1:
        slope = max(0.0, float((values[-1] - values[-2]) / (points[-1] - points[-2])))
        out = out + slope * np.maximum(x - points[-1], 0.0)
    return out


def _by_requests(samples: Sequence[tuple[int, float]], num_reqs: int) -> float:
    """Milliseconds for `num_reqs` requests, non-decreasing in them; 0 without samples."""
    if not samples:
        return 0.0
    reqs = np.array([point[0] for point in samples], dtype=np.float64)
    times = np.maximum.accumulate([point[1] for point in samples])
    return float(_interpolate(np.array([float(num_reqs)]), reqs, times)[0])


def _checked_samples(samples: Iterable[Sequence[float]]) -> tuple[Sample, ...]:
    checked = []
    for sample in samples:
        rows, context, ms, *rest = sample
        num_reqs = int(rest[0]) if rest else 1
        if not (math.isfinite(ms) and ms > 0):
            raise ValueError(f"forward time must be finite and positive, got {ms} at {rows} rows")
        if int(rows) < 1 or num_reqs < 1 or not (math.isfinite(context) and context >= 0):
            raise ValueError(f"not a step: {rows} rows, context {context}, {num_reqs} requests")
        checked.append((int(rows), float(context), float(ms), num_reqs))
    if not checked:
        raise ValueError("a step-cost table needs at least one measured forward pass")
    return tuple(checked)


def _checked_drafter(
    samples: Iterable[Sequence[float]], or_zero: bool = False
) -> tuple[tuple[int, float], ...]:
    groups: dict[int, list[float]] = {}
    for num_reqs, ms in samples:
        if int(num_reqs) < 1 or not (math.isfinite(ms) and (ms > 0 or (or_zero and ms == 0))):
            raise ValueError(f"not a drafter time: {ms} ms for {num_reqs} requests")
        groups.setdefault(int(num_reqs), []).append(float(ms))
    return tuple((reqs, float(np.median(groups[reqs]))) for reqs in sorted(groups))


def _checked_aux(name: str, ms: float) -> float:
    if not (math.isfinite(ms) and ms >= 0):
        raise ValueError(f"{name} must be finite and not negative, got {ms}")
    return float(ms)
