# SPDX-License-Identifier: Apache-2.0
"""`ema_table`: the measured table of step costs, corrected by the times of real steps.

Calibration runs without a scheduler, and the machine may change later. With P and C(n) from the
table, a batch of R requests is estimated to take

    plain step           e^p P            e^l P if it looked for copies
    step of copies       e^c Q + e^(a + s) (C(n) - C(R))       Q: C(R) without the drafter
    step with trees      e^a (C(R) + e^s (C(n) - C(R)))

a, c, l, p and s are moving averages of y = ln(measured / estimated), clipped, for batches of about
that size; until they are measured, c is p, and l and p are each other. With f the fraction of the
estimate that e^s scales, a step has weight 1 - f for a, c, l or p, and 2 f for s. The first steps
of a kind count by their median, and so do the first plain ones after many others, because p may be
far off by then. A machine that slows down slows all kinds: once a kind has been measured itself, it
also follows 80% of another one's changes.

Steps with trees beyond the largest captured graph have a factor of their own: the host launches
their kernels one by one, so their times say nothing about the cost of a row within a graph.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import median_low

import numpy as np

from vllm_bastion.policy.cost.latency import STALE, CostArray, StepEstimate
from vllm_bastion.policy.cost.table import (
    MAX_CACHED,
    StepCostTable,
    bucket_context,
    context_bucket,
)
from vllm_bastion.step_times import StepTimes

# Weight of a new step (the alpha of the paper's moving average), and its largest deviation: one
# stalled step must not change the decision.
_ALPHA, _CLIP = 0.1, 0.3
_MAX_SLOPE = math.log(3.0)
# The first steps count by their median, of two in the middle by the shorter: a step may stall.
_FIRST = 4
# Weight with which a kind follows the other one's changes.
_COMMON = 0.8
# Steps of a kind after which it counts as measured, and after which its changes are attributed to
# the machine instead of calibration's error in that kind.
_KNOWN, _SETTLED = 2, 16
# A curve is rebuilt when its shape has changed by this much. A new curve is copied to the device,
# for which smaller changes matter too little.
_SHAPE_STEP = 0.05


@dataclass(slots=True)
class _Log:
    """ln(measured / table) over the steps of a kind."""

    value: float = 0.0
    count: int = 0
    first: tuple[float, ...] = (0.0,)

    def add(self, log: float) -> float:
        """Add a step. Returns the change to add to `value`."""
        self.count += 1
        if self.count <= _FIRST:
            self.first += (log,)
            return median_low(self.first) - self.value
        return _ALPHA * min(max(log - self.value, -_CLIP), _CLIP)

    def restarted(self) -> _Log:
        """One whose next steps count by their median with the present value."""
        return _Log(self.value, min(self.count, _KNOWN), (self.value,))


@dataclass(slots=True)
class _Factors:
    """Logarithms for batches of one size, in powers of two."""

    plain: _Log = field(default_factory=_Log)
    looked: _Log = field(default_factory=_Log)
    copies: _Log = field(default_factory=_Log)
    tree: _Log = field(default_factory=_Log)
    slope: float = 0.0
    # Whether `tree` knows only steps that drafted without verifying, or the reverse.
    by_halves: bool = False
    # Steps since the last plain one; infinite if none was timed.
    plain_age: float = math.inf

    @property
    def plain_value(self) -> float:
        """p."""
        return self.plain.value if self.plain.count else self.looked.value

    @property
    def looked_value(self) -> float:
        """l."""
        return self.looked.value if self.looked.count else self.plain.value

    @property
    def copies_value(self) -> float:
        """c."""
        return self.copies.value if self.copies.count else self.plain_value

    def counts_half(self, verified: bool) -> bool:
        """Whether to learn from half a step with trees, one that only drafted or only verified."""
        known = self.tree.count
        if known and not self.by_halves:
            return False
        # What a draft takes must be known before a step that only verified one can be completed.
        return _KNOWN <= known < _FIRST if verified else known < _FIRST

    def of_another_size(self) -> _Factors:
        """Initial values for another size, which its own steps soon outweigh."""
        plain, looked, copies, tree = (
            log.restarted() for log in (self.plain, self.looked, self.copies, self.tree)
        )
        age = 0.0 if self.plain.count else math.inf
        return _Factors(plain, looked, copies, tree, self.slope, self.by_halves, age)


class CorrectedLatency:
    """See the module. A `LatencyModel`."""

    def __init__(self, table: StepCostTable) -> None:
        self.table = table
        self._factors: dict[int, _Factors] = {}
        # The slope that each size's curves were built with last.
        self._slopes: dict[int, float] = {}
        self._largest_graph = max(table.captured_sizes, default=table.max_rows)
        # ln(measured / estimated) of steps beyond the graphs, where the estimate includes `tree`.
        self._beyond, self._beyond_in_curves = _Log(), 0.0
        # Whether the last step was a plain one.
        self._after_plain = False
        # Kinds of steps that have run, other than plain ones: the batch's size in powers of two,
        # whether beyond the graphs, and whether the step drafted and verified.
        self._seen: set[tuple[int, bool, bool, bool]] = set()
        self._curve = lru_cache(MAX_CACHED)(self._make_curve)

    def factors(self, num_reqs: int) -> _Factors:
        """Of batches of about this size."""
        size = num_reqs.bit_length()
        known = self._factors.get(size)
        if known is None:
            nearest = min(self._factors, key=lambda other: abs(other - size), default=None)
            known = _Factors() if nearest is None else self._factors[nearest].of_another_size()
            self._factors[size], self._slopes[size] = known, known.slope
        return known

    def plain_age(self, num_reqs: int) -> float:
        """See `LatencyModel`; a new size counts from its first step if another one is known."""
        return self.factors(num_reqs).plain_age

    def estimate(self, num_reqs: int, context_len: float, spared: int = 0) -> StepEstimate:
        """See `LatencyModel`."""
        num_reqs = max(1, int(num_reqs))
        factors, size = self.factors(num_reqs), num_reqs.bit_length()
        if abs(factors.slope - self._slopes[size]) > _SHAPE_STEP:
            self._slopes[size] = factors.slope
        if abs(self._beyond.value - self._beyond_in_curves) > _SHAPE_STEP:
            self._beyond_in_curves = self._beyond.value
        curve = self._curve(
            num_reqs,
            context_bucket(context_len),
            spared,
            self._slopes[size],
            self._beyond_in_curves,
        )
        prior = self.table.estimate(num_reqs, context_len, spared)
        plain_ms = prior.plain_ms * math.exp(factors.plain_value)
        return StepEstimate(
            curve,
            plain_ms,
            prior.copies_ms * math.exp(factors.copies_value),
            math.exp(factors.tree.value),
            max(0.0, prior.plain_ms * math.exp(factors.looked_value) - plain_ms),
        )

    def _make_curve(
        self, num_reqs: int, bucket: int, spared: int, slope: float, beyond: float
    ) -> CostArray:
        """C / e^a, see `StepEstimate`; beyond: ln of the factor beyond the largest graph."""
        prior = self.table.estimate(num_reqs, bucket_context(bucket), spared).curve
        root = float(prior[min(num_reqs, self.table.max_rows)])
        added = prior - root
        # Steps have at least a row per request, but the curve must still decrease below that.
        added *= np.exp(np.where(added < 0, 0.0, slope))
        curve = (root + added).astype(np.float32)
        if num_reqs <= self._largest_graph:
            far = slice(self._largest_graph + 1, None)
            curve[far] = prior[far] * math.exp(beyond)
            np.maximum.accumulate(curve[num_reqs:], out=curve[num_reqs:])
        curve.setflags(write=False)
        return curve

    def observe(self, step: StepTimes, passed: int = 1) -> None:
        """See `LatencyModel`.

        A step that only drafts, or only verifies a draft, is half a step with trees. Halves count
        until a whole one is timed: with short replies, prompts come between most drafts and the
        steps that verify them. The first step of a kind may compile, and is skipped. So is the
        first plain step after others: on the tiny pair it takes 1.2 to 1.3 times as long as later
        ones in a row.
        """
        undrafted = step.undrafted
        is_plain = undrafted and not step.verified
        first = is_plain and not self._after_plain and passed == 1
        self._after_plain = is_plain
        if step.total_ms is None or first:
            return
        if not (math.isfinite(step.total_ms) and step.total_ms > 0):
            return
        num_reqs = max(1, step.num_reqs)
        is_whole = step.drafted and step.verified
        is_half = not (undrafted or is_whole)
        if is_half and not self.factors(num_reqs).counts_half(step.verified):
            return
        row = min(max(step.rows, num_reqs), self.table.max_rows)
        beyond = step.verified and num_reqs <= self._largest_graph < row
        kind = (num_reqs.bit_length(), beyond, step.drafted, step.verified)
        if not is_plain and kind not in self._seen:
            self._seen.add(kind)
            return
        prior = self.table.estimate(num_reqs, step.context_len, step.spared)
        factors = self.factors(num_reqs)
        if not is_plain or step.looked:
            factors.plain_age += 1.0
        else:
            if STALE <= factors.plain_age < math.inf:
                factors.plain = factors.plain.restarted()
            factors.plain_age = 0.0
        if is_whole and factors.by_halves:
            factors.tree = _Log(factors.tree.value, first=(factors.tree.value,))
        if not undrafted:
            factors.by_halves = is_half
        plain_log, copies_log, tree_log = factors.plain, factors.copies, factors.tree
        ms, root = float(prior.curve[row]), float(prior.curve[min(num_reqs, row)])
        total_ms = step.total_ms
        if is_half and step.verified:  # and what a draft adds
            drafted_ms = math.exp(tree_log.value) * root
            total_ms += max(0.0, drafted_ms - math.exp(factors.plain_value) * prior.plain_ms)
        if beyond:
            if not undrafted:
                log = math.log(total_ms / ms) - tree_log.value
                self._beyond.value += self._beyond.add(log)
            return
        added = math.exp(factors.slope) * (ms - root) if step.verified else 0.0
        if not undrafted:
            own, base = tree_log, root
        elif not step.verified:
            own, base = factors.looked if step.looked else plain_log, prior.plain_ms
        else:
            own, base = copies_log, prior.copies_ms
            # e^c is a factor of the whole below, but nodes have trees' factor.
            added *= math.exp(tree_log.value - factors.copies_value)
        fraction = added / (base + added)
        change = own.add(math.log(total_ms / (base + added)))
        if own.count > _FIRST:
            slope = factors.slope + 2.0 * fraction * change
            factors.slope = min(max(slope, -_MAX_SLOPE), _MAX_SLOPE)
            change *= 1.0 - fraction
        own.value += change
        for other in (plain_log, factors.looked, copies_log, tree_log):
            if other is not own and other.count >= _KNOWN and own.count >= _SETTLED:
                other.value += _COMMON * change

    def correction(self, num_reqs: int) -> dict[str, float]:
        """See `LatencyModel`."""
        factors = self.factors(num_reqs)
        logs = factors.plain_value, factors.copies_value, factors.tree.value, factors.slope
        return dict(zip(("plain", "copies", "tree", "rows"), map(math.exp, logs), strict=True))
