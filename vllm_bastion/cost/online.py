# SPDX-License-Identifier: Apache-2.0
"""Latency estimators: what the controller believes one cycle costs.

`LatencyModel` is the seam between what is measured and what is decided. Five models:

    table      C(n) = measured step-cost table
    ema_table  C(n) = c * its forward time                       + T_draft + T_aux
    static     C(n) = calibrated roofline at the padded size     + T_draft + T_aux   (the paper's)
    ema        C(n) = c * bare roofline at the padded size       + T_draft + T_aux
    ema_calib  C(n) = c * calibrated roofline at the padded size + T_draft + T_aux

with c <- (1 - alpha) c + alpha * (observed / predicted), the paper's EMA, fed by the target's
forward time of real steps. The paper's update believes every observation; a first use of a shape, a
preemption or a stall then shifts all sizes at once. Here the first observation of every padded size
is dropped, the ratio taken in is the median of the last five, and after the start it may pull c by
no more than `_MAX_PULL` at a time: isolated outliers do nothing, a lasting change arrives.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import Literal, Protocol, get_args

import numpy as np

from vllm_bastion.cost.forward_times import Carrier, FloatArray
from vllm_bastion.cost.table import (
    CostArray,
    StepCostTable,
    bucket_context,
    context_bucket,
)

LatencyName = Literal["table", "ema_table", "static", "ema", "ema_calib"]

_ALPHA = 0.1
_WINDOW = 5
_MAX_PULL = 1.5
# Costs are rebuilt when c has moved by this much: a caller that copies them to a device compares
# the array's identity, and a change below 1 % moves no decision worth a copy.
_BIAS_STEP = 0.01
_MAX_CACHED = 512


class LatencyModel(Protocol):
    """Cost of one cycle, by total target rows."""

    def cycle_cost_ms(self, num_reqs: int, context_len: float) -> CostArray:
        """[max_rows + 1] float32 ms of a whole cycle (forward + drafter + T_aux).

        Entry n is for n target rows (roots, nodes and prefill tokens); `context_len` is the mean
        number of cached tokens per request. Finite, positive, non-decreasing, read-only; the same
        object as before while nothing has changed.
        """
        ...

    def plain_ms(self, num_reqs: int, context_len: float) -> float:
        """Milliseconds of a step that neither drafts nor verifies."""
        ...

    def beyond_forward_ms(self, num_reqs: int) -> float:
        """Milliseconds of `cycle_cost_ms` that are not the forward pass: T_draft + T_aux."""
        ...

    def observe(self, rows: int, num_reqs: int, context_len: float, measured_ms: float) -> None:
        """Take in one real step.

        Args:
            rows: target rows of the step.
            num_reqs: requests in it.
            context_len: mean cached tokens per request.
            measured_ms: the target's forward time, the same span as in the table's samples
                (never the whole cycle: a factor on the whole cycle changes no decision).
        """
        ...


class TableLatency:
    """`table`: the measured step-cost table, fixed."""

    def __init__(self, table: StepCostTable) -> None:
        self.table = table

    def cycle_cost_ms(self, num_reqs: int, context_len: float) -> CostArray:
        """See `LatencyModel`."""
        return self.table.cost_ms(num_reqs, context_len)

    def plain_ms(self, num_reqs: int, context_len: float) -> float:
        """See `LatencyModel`."""
        return self.table.plain_ms(num_reqs, context_len)

    def beyond_forward_ms(self, num_reqs: int) -> float:
        """See `LatencyModel`."""
        return self.table.drafter_ms(num_reqs) + self.table.aux_ms

    def observe(self, rows: int, num_reqs: int, context_len: float, measured_ms: float) -> None:
        """Nothing: the table is what was measured at start-up."""


class CurveLatency:
    """All but `table`: a curve of the target's forward time, corrected online or not.

    Args:
        curve: the bare or the calibrated roofline; None for the table's own forward times.
        table: drafter time, T_aux and graph sizes.
        online: whether `observe` corrects the curve.
    """

    def __init__(self, curve: Carrier | None, table: StepCostTable, *, online: bool) -> None:
        self.curve = curve
        self.table = table
        self.bias = RobustBias() if online else None
        self._forward: dict[tuple[int, int], FloatArray] = {}
        self._cost: dict[tuple[int, int, int], CostArray] = {}

    def cycle_cost_ms(self, num_reqs: int, context_len: float) -> CostArray:
        """See `LatencyModel`."""
        num_reqs, bucket = max(1, int(num_reqs)), context_bucket(context_len)
        step = 0 if self.bias is None else round(math.log(self.bias.value) / _BIAS_STEP)
        cost = self._cost.get((num_reqs, bucket, step))
        if cost is None:
            forward = self._forward_ms(num_reqs, bucket) * math.exp(step * _BIAS_STEP)
            total = forward + self.table.drafter_ms(num_reqs) + self.table.aux_ms
            cost = total.astype(np.float32)
            cost.setflags(write=False)
            if len(self._cost) >= _MAX_CACHED:
                self._cost.clear()
            self._cost[num_reqs, bucket, step] = cost
        return cost

    def plain_ms(self, num_reqs: int, context_len: float) -> float:
        """See `LatencyModel`."""
        num_reqs = max(1, int(num_reqs))
        forward = self._forward_ms(num_reqs, context_bucket(context_len))
        bias = 1.0 if self.bias is None else self.bias.value
        row = min(num_reqs, self.table.max_rows)
        return float(forward[row]) * bias + self.table.plain_aux_ms

    def beyond_forward_ms(self, num_reqs: int) -> float:
        """See `LatencyModel`."""
        return self.table.drafter_ms(num_reqs) + self.table.aux_ms

    def observe(self, rows: int, num_reqs: int, context_len: float, measured_ms: float) -> None:
        """See `LatencyModel`."""
        if self.bias is None:
            return
        row = min(max(int(rows), 1), self.table.max_rows)
        predicted = self._forward_ms(max(1, int(num_reqs)), context_bucket(context_len))[row]
        self.bias.update(int(self.table.padded_rows[row]), measured_ms / float(predicted))

    def _forward_ms(self, num_reqs: int, bucket: int) -> FloatArray:
        """[max_rows + 1] float64: the uncorrected curve at the sizes that really run."""
        forward = self._forward.get((num_reqs, bucket))
        if forward is None:
            if len(self._forward) >= _MAX_CACHED:
                self._forward.clear()
            context = bucket_context(bucket)
            if self.curve is None:
                forward = self.table.forward_ms(num_reqs, context)
            else:
                rows = self.table.padded_rows
                forward = np.maximum.accumulate(self.curve.predict_ms(rows, context, num_reqs))
            self._forward[num_reqs, bucket] = forward
        return forward


class RobustBias:
    """The factor c: an EMA of observed over predicted that isolated outliers do not move."""

    def __init__(self, alpha: float = _ALPHA) -> None:
        self.value = 1.0
        self._alpha = alpha
        self._recent: deque[float] = deque(maxlen=_WINDOW)
        self._seen: set[int] = set()

    def update(self, size: int, ratio: float) -> None:
        """Take in observed / predicted of a step of `size` rows (after padding)."""
        if not (math.isfinite(ratio) and ratio > 0):
            return
        if size not in self._seen:
            self._seen.add(size)
            return
        started = len(self._recent) == _WINDOW
        self._recent.append(ratio)
        middle = median(self._recent)
        if started:
            middle = min(max(middle, self.value / _MAX_PULL), self.value * _MAX_PULL)
            self.value += self._alpha * (middle - self.value)
        else:
            # A bare roofline can be far off: start from what is seen, not from one.
            self.value = middle


def make_latency(
    name: LatencyName,
    table: StepCostTable,
    *,
    roofline: Carrier | None = None,
    calibrated: Carrier | None = None,
) -> LatencyModel:
    """The estimator of that name.

    Args:
        name: value of `bastion_latency_model`.
        table: the measured step-cost table.
        roofline: the bare roofline, for `ema`.
        calibrated: the calibrated one, for `static` and `ema_calib`.

    Raises:
        ValueError: unknown name, or the curve that it needs is missing.
    """
    if name == "table":
        return TableLatency(table)
    if name == "ema_table":
        return CurveLatency(None, table, online=True)
    if name not in get_args(LatencyName):
        names = ", ".join(get_args(LatencyName))
        raise ValueError(f"bastion_latency_model must be one of {names}, got {name!r}")
    curve = roofline if name == "ema" else calibrated
    if curve is None:
        raise ValueError(
            f"bastion_latency_model {name!r} needs a roofline of the target, and there is none for "
            "this model or profile; use 'ema_table'"
        )
    return CurveLatency(curve, table, online=name != "static")
