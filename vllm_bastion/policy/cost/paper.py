# SPDX-License-Identifier: Apache-2.0
"""The paper's latency models, and the table as it was measured.

    table      the measured step-cost table
    static     calibrated roofline at the padded size                       + T_draft + T_aux
    ema        bare roofline at the padded size, times c                    + T_draft + T_aux
    ema_calib  calibrated roofline at the padded size, times c              + T_draft + T_aux

c is the paper's moving average of the target's observed over predicted forward time. It scales all
steps alike, so it cannot change which tree size is best.
"""

from __future__ import annotations

import math

import numpy as np

from vllm_bastion.policy.cost.forward_times import Carrier, FloatArray
from vllm_bastion.policy.cost.latency import StepEstimate, keep
from vllm_bastion.policy.cost.table import StepCostTable, bucket_context, context_bucket
from vllm_bastion.step_times import StepTimes

# Costs are rebuilt when ln c has changed by this much: callers copy a new array to the device, and
# a smaller change would alter no decision that is worth the copy.
_LOG_STEP = 0.01
_ALPHA = 0.1  # of the paper's moving average


class CurveLatency:
    """All models but `ema_table`: forward times, with the paper's correction or without.

    Args:
        table: drafter time, T_aux and graph sizes.
        curve: the bare or the calibrated roofline; None for the table's own forward times.
        online: whether real steps correct the curve.
    """

    def __init__(
        self, table: StepCostTable, curve: Carrier | None = None, *, online: bool = False
    ) -> None:
        self.table, self.curve = table, curve
        # c; None if it stays 1.
        self.factor: float | None = 1.0 if online else None
        self._seen: set[int] = set()
        self._forward: dict[tuple[int, int], FloatArray] = {}
        self._estimates: dict[tuple[int, int, int, int], StepEstimate] = {}

    def estimate(self, num_reqs: int, context_len: float, spared: int = 0) -> StepEstimate:
        """See `LatencyModel`."""
        table, num_reqs = self.table, max(1, int(num_reqs))
        log_c = 0 if self.factor is None else round(math.log(self.factor) / _LOG_STEP)
        key = (num_reqs, context_bucket(context_len), log_c, spared)
        estimate = self._estimates.get(key)
        if estimate is None:
            forward = self._forward_ms(*key[:2]) * math.exp(_LOG_STEP * log_c)
            drafter_ms = table.drafter_ms(num_reqs, spared)
            curve = (forward + drafter_ms + table.aux_ms).astype(np.float32)
            curve.setflags(write=False)
            plain_ms = float(forward[min(num_reqs, table.max_rows)]) + table.plain_aux_ms
            estimate = StepEstimate(curve, plain_ms)
            keep(self._estimates, key, estimate)
        return estimate

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

    def plain_is_known(self, num_reqs: int) -> bool:
        """See `LatencyModel`: no model here learns from plain steps."""
        return True

    def correction(self, num_reqs: int) -> dict[str, float]:
        """See `LatencyModel`."""
        return {} if self.factor is None else {"tree": self.factor}

    def _forward_ms(self, num_reqs: int, bucket: int) -> FloatArray:
        """[max_rows + 1] float64: the uncorrected curve at the padded sizes."""
        forward = self._forward.get((num_reqs, bucket))
        if forward is None:
            context = bucket_context(bucket)
            if self.curve is None:
                forward = self.table.forward_ms(num_reqs, context)
            else:
                rows = self.table.padded_rows
                forward = np.maximum.accumulate(self.curve.predict_ms(rows, context, num_reqs))
            keep(self._forward, (num_reqs, bucket), forward)
        return forward
