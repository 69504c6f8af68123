# SPDX-License-Identifier: Apache-2.0
"""Latency models: what one step of speculative decoding is estimated to cost.

`LatencyModel` is the interface between measuring and deciding. There are five models:

    table      the measured step-cost table
    ema_table  the same, corrected by the times of whole steps (`StepFilter`)
    static     calibrated roofline at the padded size                       + T_draft + T_aux
    ema        bare roofline at the padded size, times c                    + T_draft + T_aux
    ema_calib  calibrated roofline at the padded size, times c              + T_draft + T_aux

The last three are the paper's. c is its moving average of the target's observed over predicted
forward time. It scales all steps alike, so it cannot change which tree size is best.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, Protocol, TypeVar, get_args

import numpy as np

from vllm_bastion.policy.cost.forward_times import Carrier, FloatArray
from vllm_bastion.policy.cost.step_filter import StepFilter
from vllm_bastion.policy.cost.table import (
    CostArray,
    StepCostTable,
    bucket_context,
    context_bucket,
)
from vllm_bastion.policy.cost.timing import StepTimes

LatencyName = Literal["table", "ema_table", "static", "ema", "ema_calib"]

# Costs are rebuilt when the log of a factor has changed by this much. Callers copy a new array to
# the device, and a smaller change would alter no decision that is worth the copy.
_LOG_STEP = 0.01
_SLOPE_STEP = 0.05  # the same for the part of a step that depends on its rows
_MAX_CACHED = 512
# In place of a size of batch: steps that only their trees take beyond the graphs.
_UNGRAPHED = -1
_ALPHA = 0.1  # of the paper's moving average


class StepEstimate(NamedTuple):
    """What the next step of a batch costs, of either kind."""

    # [max_rows + 1] float32, entry n for n target rows (roots, nodes and prompt tokens): ms of a
    # whole step with trees, over `factor`. Finite, positive, non-decreasing and read-only; the same
    # object until it changes. It is all that N* depends on.
    curve: CostArray
    # ms of a step that neither drafts nor verifies.
    plain_ms: float
    # Standard deviation of ln(tree step / plain step); 0 where costs are taken as they are.
    ratio_sd: float = 0.0
    factor: float = 1.0

    def tree_step_ms(self, rows: int) -> float:
        """ms of a step with trees and so many target rows."""
        return self.factor * float(self.curve[min(rows, len(self.curve) - 1)])

    @property
    def tree_ms(self) -> CostArray:
        """[max_rows + 1] float32 ms: `tree_step_ms` of every number of rows."""
        return (self.factor * self.curve).astype(np.float32)


class LatencyModel(Protocol):
    """Cost of a step, by its total target rows."""

    def estimate(self, num_reqs: int, context_len: float, spared: int = 0) -> StepEstimate:
        """The next step's cost.

        Args:
            num_reqs: requests that decode in the step.
            context_len: mean cached tokens per request.
            spared: positions of its block that the drafter does not predict.
        """
        ...

    def observe(self, step: StepTimes, passed: int = 1) -> None:
        """Learn from a completed step, the last of `passed` steps since the one observed before."""
        ...

    def correction(self, num_reqs: int) -> dict[str, float]:
        """Factors by which real steps of such a batch differ from the profile; empty without.

        "plain": plain steps. "tree": steps with trees and one row for each request. "rows": what
        further rows add, beyond "tree".
        """
        ...


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
            _keep(self._estimates, key, estimate)
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
            _keep(self._forward, (num_reqs, bucket), forward)
        return forward


class FilteredLatency:
    """`ema_table`: the measured table, corrected by the times of whole steps.

    Trees that take a batch beyond the largest captured graph have a filter of their own: the host
    launches the kernels of such a step one by one, and its time tells nothing of what a row costs
    in a graph.
    """

    def __init__(self, table: StepCostTable) -> None:
        self.table = table
        self._prior = CurveLatency(table)
        # By powers of two of requests: the filter, and the step of its last observation.
        self._filters: dict[int, StepFilter] = {}
        self._observed: dict[int, int] = {_UNGRAPHED: 0}
        # The slope that the filter's curves were built with last.
        self._slopes: dict[int, float] = {}
        # Most rows of a graph, and the filter of steps beyond it. What they take is relative to
        # their prior and to the `tree` of their batch; its logarithm is kept as the curves have it.
        self._largest_graph = max(table.captured_sizes, default=table.max_rows)
        self._ungraphed = StepFilter()
        self._ungraphed_log = 0.0
        self._steps = 0
        self._after_plain = False
        # Sizes of the batch, in powers of two, and kinds of step that were seen.
        self._seen: set[tuple[int, bool]] = set()
        self._curves: dict[tuple[int, int, float, float, int], CostArray] = {}

    def estimate(self, num_reqs: int, context_len: float, spared: int = 0) -> StepEstimate:
        """See `LatencyModel`."""
        num_reqs = max(1, int(num_reqs))
        prior = self._prior.estimate(num_reqs, context_len, spared)
        state = self.filter(num_reqs)
        size = num_reqs.bit_length()
        slope = self._slopes[size]
        if abs(state.slope - slope) > _SLOPE_STEP:
            slope = self._slopes[size] = state.slope
        if abs(self._ungraphed.tree - self._ungraphed_log) > _SLOPE_STEP:
            self._ungraphed_log = self._ungraphed.tree
        key = (num_reqs, context_bucket(context_len), slope, self._ungraphed_log, spared)
        curve = self._curves.get(key)
        if curve is None:
            root = float(prior.curve[min(num_reqs, self.table.max_rows)])
            added = prior.curve - root
            # No step has fewer rows than requests, but the curve must still decrease there.
            added *= np.exp(np.where(added < 0, 0.0, slope))
            curve = (root + added).astype(np.float32)
            if num_reqs <= self._largest_graph:
                beyond = slice(self._largest_graph + 1, None)
                curve[beyond] = prior.curve[beyond] * math.exp(self._ungraphed_log)
                np.maximum.accumulate(curve[num_reqs:], out=curve[num_reqs:])
            curve.setflags(write=False)
            _keep(self._curves, key, curve)
        plain_ms = prior.plain_ms * math.exp(state.level)
        return StepEstimate(curve, plain_ms, state.ratio_sd, math.exp(state.tree))

    def filter(self, num_reqs: int) -> StepFilter:
        """The filter of batches of about this size."""
        size = num_reqs.bit_length()
        state = self._filters.get(size)
        if state is None:
            nearest = min(self._filters, key=lambda other: abs(other - size), default=None)
            like = None if nearest is None else self._filters[nearest]
            state = self._filters[size] = StepFilter(like)
            self._slopes[size] = state.slope
            self._observed[size] = self._steps
        return state

    def observe(self, step: StepTimes, passed: int = 1) -> None:
        """See `LatencyModel`.

        A step that only verifies or only drafts is neither a step with trees nor a plain one. The
        first of a kind may compile, and does not count; the filter clips later ones. Nor does a
        plain step that no plain step precedes: on the tiny pair it takes 1.3 times as long as the
        tenth in a row.
        """
        self._steps += passed
        plain = not step.verified and not step.drafted
        first_plain = plain and not self._after_plain and passed == 1
        self._after_plain = plain
        if step.total_ms is None or step.verified != step.drafted:
            return
        num_reqs = max(1, step.num_reqs)
        row = min(max(step.rows, num_reqs), self.table.max_rows)
        ungraphed = step.verified and num_reqs <= self._largest_graph < row
        size = _UNGRAPHED if ungraphed else num_reqs.bit_length()
        kind = (size, step.verified)
        if first_plain or kind not in self._seen:
            self._seen.add(kind)
            return
        batch = self.filter(num_reqs)
        state = self._ungraphed if ungraphed else batch
        state.age(self._steps - self._observed[size])
        self._observed[size] = self._steps
        prior = self._prior.estimate(num_reqs, step.context_len, step.spared)
        if ungraphed:
            state.observe_tree(math.exp(batch.tree) * float(prior.curve[row]), 0.0, step.total_ms)
        elif step.verified:
            root = float(prior.curve[min(num_reqs, row)])
            state.observe_tree(root, float(prior.curve[row]) - root, step.total_ms)
        else:
            state.observe_plain(prior.plain_ms, step.total_ms)

    def correction(self, num_reqs: int) -> dict[str, float]:
        """See `LatencyModel`."""
        state = self.filter(num_reqs)
        parts = {"plain": state.level, "tree": state.tree, "rows": state.slope}
        return {part: math.exp(log) for part, log in parts.items()}


_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


def _keep(cache: dict[_Key, _Value], key: _Key, value: _Value) -> None:
    if len(cache) >= _MAX_CACHED:
        cache.clear()
    cache[key] = value


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
        return CurveLatency(table)
    if name == "ema_table":
        return FilteredLatency(table)
    if name not in get_args(LatencyName):
        names = ", ".join(get_args(LatencyName))
        raise ValueError(f"bastion_latency_model must be one of {names}, got {name!r}")
    curve = roofline if name == "ema" else calibrated
    if curve is None:
        raise ValueError(
            f"bastion_latency_model {name!r} needs a roofline of the target, and there is none for "
            "this model or profile; use 'ema_table'"
        )
    return CurveLatency(table, curve, online=name != "static")
