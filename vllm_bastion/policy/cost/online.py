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

with the factors of a `Correction`.
"""

from __future__ import annotations

import math
from typing import Literal, Protocol, get_args

import numpy as np

from vllm_bastion.policy.cost.correction import Correction
from vllm_bastion.policy.cost.forward_times import Carrier, FloatArray
from vllm_bastion.policy.cost.table import (
    CostArray,
    StepCostTable,
    bucket_context,
    context_bucket,
)

LatencyName = Literal["table", "ema_table", "static", "ema", "ema_calib"]

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

    def follow(self, ratio: float) -> None:
        """Take in the whole time of a step without a draft, over what was expected of it."""
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

    def follow(self, ratio: float) -> None:
        """Nothing, as above."""


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

    def follow(self, ratio: float) -> None:
        """See `LatencyModel`."""
        if self.bias is not None:
            self.bias.follow(ratio)

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
