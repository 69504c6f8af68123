# SPDX-License-Identifier: Apache-2.0
"""Latency estimators: what the controller believes one cycle costs.

`LatencyModel` is the seam between what is measured and what is decided. Five models:

    table      C(n) = measured step-cost table
    ema_table  C(n) = its forward time, corrected                        + T_draft + T_aux
    static     C(n) = calibrated roofline at the padded size             + T_draft + T_aux
    ema        C(n) = bare roofline at the padded size, corrected        + T_draft + T_aux
    ema_calib  C(n) = calibrated roofline at the padded size, corrected  + T_draft + T_aux

`static` is the paper's. Corrected is, for a curve T and a batch of R requests,

    c T(R) + d (T(n) - T(R))

The paper has one factor, c <- (1 - alpha) c + alpha * (observed / predicted), fed by the target's
forward time of real steps. It says which steps are dear and nothing of where a tree should end: a
step's first rows wait for memory, further ones for arithmetic, and a neighbour on the memory bus or
a lower clock changes one of the two. See `Correction`.
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
# How fast c and d part, how far, and how far an observation may be from the median of the last.
_BETA = 1.0
_MAX_APART = 0.5 * math.log(3.0)
_WIDTH = 1.15
# Costs are rebuilt when a factor has moved by this much: a caller that copies them to a device
# compares the array's identity, and a smaller change moves no decision worth a copy.
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
        self.bias = Correction() if online else None
        self._forward: dict[tuple[int, int], FloatArray] = {}
        self._cost: dict[tuple[int, int, int, int], CostArray] = {}

    def cycle_cost_ms(self, num_reqs: int, context_len: float) -> CostArray:
        """See `LatencyModel`."""
        num_reqs, bucket = max(1, int(num_reqs)), context_bucket(context_len)
        first = more = 0
        if self.bias is not None:
            first = round(math.log(self.bias.first) / _BIAS_STEP)
            more = round(math.log(self.bias.more) / _BIAS_STEP)
        key = (num_reqs, bucket, first, more)
        cost = self._cost.get(key)
        if cost is None:
            forward = self._forward_ms(num_reqs, bucket)
            root = forward[min(num_reqs, self.table.max_rows)]
            # Fewer rows than requests never run; there the curve is to fall all the same.
            added = (forward - root) * np.exp(_BIAS_STEP * np.where(forward < root, first, more))
            forward = root * math.exp(_BIAS_STEP * first) + added
            total = forward + self.table.drafter_ms(num_reqs) + self.table.aux_ms
            cost = total.astype(np.float32)
            cost.setflags(write=False)
            if len(self._cost) >= _MAX_CACHED:
                self._cost.clear()
            self._cost[key] = cost
        return cost

    def plain_ms(self, num_reqs: int, context_len: float) -> float:
        """See `LatencyModel`."""
        num_reqs = max(1, int(num_reqs))
        forward = self._forward_ms(num_reqs, context_bucket(context_len))
        bias = 1.0 if self.bias is None else self.bias.first
        row = min(num_reqs, self.table.max_rows)
        return float(forward[row]) * bias + self.table.plain_aux_ms

    def beyond_forward_ms(self, num_reqs: int) -> float:
        """See `LatencyModel`."""
        return self.table.drafter_ms(num_reqs) + self.table.aux_ms

    def observe(self, rows: int, num_reqs: int, context_len: float, measured_ms: float) -> None:
        """See `LatencyModel`."""
        if self.bias is None:
            return
        num_reqs, most = max(1, int(num_reqs)), self.table.max_rows
        row = min(max(int(rows), 1), most)
        forward = self._forward_ms(num_reqs, context_bucket(context_len))
        whole, root = float(forward[row]), float(forward[min(num_reqs, row)])
        self.bias.update(int(self.table.padded_rows[row]), root, whole - root, measured_ms)

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


class Correction:
    """The factors `first` (c) and `more` (d) of a step's time: of its roots, and of its other rows.

    Both follow the ratio of observed and predicted by the paper's EMA. They part as far as steps
    with many rows disagree with steps with few: by the ratio's covariance with the part of the time
    that is d's, so that steps of one size alone part nothing.

    A first use of a shape, a preemption or a stall must not shift all sizes at once: the first
    observation of every padded size is dropped, a ratio further than `_WIDTH` from the median of
    the last five counts as that far, and the median itself as no more than `_MAX_PULL`. Isolated
    outliers do next to nothing, a lasting change arrives.
    """

    def __init__(self, alpha: float = _ALPHA) -> None:
        self._alpha = alpha
        # log c = log_both - log_apart, log d = log_both + log_apart
        self._log_both = self._log_apart = 0.0
        self._recent: deque[float] = deque(maxlen=_WINDOW)
        self._seen: set[int] = set()
        # running mean of d's part of a step's time
        self._mean_part: float | None = None

    @property
    def first(self) -> float:
        """c: of what a step takes with a row for each request."""
        return math.exp(self._log_both - self._log_apart)

    @property
    def more(self) -> float:
        """d: of what further rows add to that."""
        return math.exp(self._log_both + self._log_apart)

    def update(self, size: int, root_ms: float, added_ms: float, measured_ms: float) -> None:
        """Take in a step of `size` rows (after padding), of which the curve says root + added."""
        predicted = self.first * root_ms + self.more * added_ms
        ratio = measured_ms / predicted
        if not (math.isfinite(ratio) and ratio > 0):
            return
        if size not in self._seen:
            self._seen.add(size)
            return
        started = len(self._recent) == _WINDOW
        self._recent.append(ratio)
        middle = median(self._recent)
        part = self.more * added_ms / predicted
        if not started or self._mean_part is None:
            # A bare roofline can be far off: start from what is seen, not from one.
            self._scale(middle)
            self._mean_part = part
            return
        beside = min(max(ratio / middle, 1 / _WIDTH), _WIDTH)
        middle = min(max(middle, 1 / _MAX_PULL), _MAX_PULL)
        apart = self._log_apart + 0.5 * _BETA * (beside - 1.0) * (part - self._mean_part)
        self._log_apart = min(max(apart, -_MAX_APART), _MAX_APART)
        self._mean_part += self._alpha * (part - self._mean_part)
        self._scale(1.0 + self._alpha * (middle * beside - 1.0))

    def _scale(self, factor: float) -> None:
        self._log_both += math.log(factor)
        # What was seen of late was seen beside another prediction.
        for i, ratio in enumerate(self._recent):
            self._recent[i] = ratio / factor


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
