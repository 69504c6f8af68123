# SPDX-License-Identifier: Apache-2.0
"""Latency models: what one cycle of speculative decoding is estimated to cost.

`LatencyModel` is the interface between measuring and deciding. There are five models:

    table      C(n) = measured step-cost table
    ema_table  C(n) = its forward time, corrected                        + T_draft + T_aux
    static     C(n) = calibrated roofline at the padded size             + T_draft + T_aux
    ema        C(n) = bare roofline at the padded size, corrected        + T_draft + T_aux
    ema_calib  C(n) = calibrated roofline at the padded size, corrected  + T_draft + T_aux

`static` is the paper's. "Corrected" means, for a curve T and a batch of R requests,

    c T(R) + d (T(n) - T(R))

with the factors c and d of a `Correction`.
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

# Costs are rebuilt when the log of a factor has changed by this much. Callers copy a new array to
# the device, and a smaller change would alter no decision that is worth the copy.
_LOG_STEP = 0.01
_MAX_CACHED = 512


class LatencyModel(Protocol):
    """Cost of one cycle by its total target rows."""

    def cycle_cost_ms(self, num_reqs: int, context_len: float) -> CostArray:
        """Milliseconds of a whole cycle: forward pass, drafter and T_aux.

        Args:
            num_reqs: requests that decode in the step.
            context_len: mean cached tokens per request.

        Returns:
            [max_rows + 1] float32, entry n for n target rows (roots, nodes and prefill tokens);
            finite, positive, non-decreasing and read-only. The same object until costs change.
        """
        ...

    def plain_ms(self, num_reqs: int, context_len: float) -> float:
        """Milliseconds of a step that neither drafts nor verifies."""
        ...

    def beyond_forward_ms(self, num_reqs: int) -> float:
        """Milliseconds of `cycle_cost_ms` that are not the forward pass: T_draft + T_aux."""
        ...

    def observe(self, rows: int, num_reqs: int, context_len: float, measured_ms: float) -> None:
        """Learn from a tree step.

        Args:
            rows: its target rows.
            num_reqs: its requests.
            context_len: mean cached tokens per request.
            measured_ms: the target's forward time, from and to where the table's samples are timed
                (not the whole cycle: a factor on the whole cycle changes no decision).
        """
        ...

    def observe_plain(self, ratio: float) -> None:
        """Learn from a plain step: its whole time over the time expected."""
        ...


class TableLatency:
    """`table`: the measured step-cost table, never corrected."""

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
        """Ignored: the table stays as it was measured."""

    def observe_plain(self, ratio: float) -> None:
        """Ignored, as above."""


class CurveLatency:
    """All models but `table`: a curve of the target's forward time, with or without correction.

    Args:
        curve: the bare or the calibrated roofline; None for the table's own forward times.
        table: drafter time, T_aux and graph sizes.
        online: whether real steps correct the curve.
    """

    def __init__(self, curve: Carrier | None, table: StepCostTable, *, online: bool) -> None:
        self.curve = curve
        self.table = table
        self.correction = Correction() if online else None
        self._forward: dict[tuple[int, int], FloatArray] = {}
        self._cost: dict[tuple[int, int, int, int], CostArray] = {}

    def cycle_cost_ms(self, num_reqs: int, context_len: float) -> CostArray:
        """See `LatencyModel`."""
        num_reqs, bucket = max(1, int(num_reqs)), context_bucket(context_len)
        log_c = log_d = 0  # in units of _LOG_STEP
        if self.correction is not None:
            log_c = round(math.log(self.correction.root) / _LOG_STEP)
            log_d = round(math.log(self.correction.added) / _LOG_STEP)
        key = (num_reqs, bucket, log_c, log_d)
        cost = self._cost.get(key)
        if cost is None:
            forward = self._forward_ms(num_reqs, bucket)
            root = forward[min(num_reqs, self.table.max_rows)]
            # No step has fewer rows than requests, but the curve must still decrease there.
            added = (forward - root) * np.exp(_LOG_STEP * np.where(forward < root, log_c, log_d))
            forward = root * math.exp(_LOG_STEP * log_c) + added
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
        factor = 1.0 if self.correction is None else self.correction.root
        row = min(num_reqs, self.table.max_rows)
        return float(forward[row]) * factor + self.table.plain_aux_ms

    def beyond_forward_ms(self, num_reqs: int) -> float:
        """See `LatencyModel`."""
        return self.table.drafter_ms(num_reqs) + self.table.aux_ms

    def observe(self, rows: int, num_reqs: int, context_len: float, measured_ms: float) -> None:
        """See `LatencyModel`."""
        if self.correction is None:
            return
        num_reqs = max(1, int(num_reqs))
        row = min(max(int(rows), 1), self.table.max_rows)
        forward = self._forward_ms(num_reqs, context_bucket(context_len))
        whole, root = float(forward[row]), float(forward[min(num_reqs, row)])
        self.correction.observe(int(self.table.padded_rows[row]), root, whole - root, measured_ms)

    def observe_plain(self, ratio: float) -> None:
        """See `LatencyModel`."""
        if self.correction is not None:
            self.correction.observe_plain(ratio)

    def _forward_ms(self, num_reqs: int, bucket: int) -> FloatArray:
        """[max_rows + 1] float64: the uncorrected curve at the padded sizes."""
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
    """The latency model of that name.

    Args:
        name: value of `bastion_latency_model`.
        table: the measured step-cost table.
        roofline: the bare roofline, for `ema`.
        calibrated: the calibrated roofline, for `static` and `ema_calib`.

    Raises:
        ValueError: the name is unknown, or the roofline that it needs is missing.
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
