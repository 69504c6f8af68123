# SPDX-License-Identifier: Apache-2.0
"""How the times of real steps correct the predicted cost of a step.

The paper has one factor, c <- (1 - alpha) c + alpha * (observed / predicted), updated by the
target's forward time of real steps. It scales all steps alike, so it cannot change which tree size
is best. But sizes do change differently: a step's first rows wait for memory and further rows for
arithmetic, so a neighbour on the memory bus, or a lower clock, changes one more than the other.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

_ALPHA = 0.1  # of the moving average, as in the paper
_WINDOW = 5  # observations of the median that outliers are compared with
_MAX_PULL = 1.5  # one update uses at most this ratio, or its inverse
_BETA = 1.0  # how fast c and d separate
_MAX_LOG_SPLIT = 0.5 * math.log(3.0)  # c and d differ at most by a factor of 3
_OUTLIER = 1.15  # an observation counts as at most this ratio to the median


class Correction:
    """The factors of a step's time: `root` (c) for its roots, `added` (d) for all further rows.

    Both follow the ratio of observed to predicted time by the paper's moving average. They separate
    if steps with many rows disagree with steps with few rows: by the covariance of the ratio with
    the fraction of the time that d scales. Steps of a single size separate nothing.

    The first use of a shape, a preemption or a stall must not shift all sizes at once. So the first
    observation of every padded size is dropped, a ratio further than `_OUTLIER` from the median of
    the last five is clipped to it, and the median itself to `_MAX_PULL`. Isolated outliers have
    almost no effect; a lasting change arrives.
    """

    def __init__(self, alpha: float = _ALPHA) -> None:
        self._alpha = alpha
        # log c = log_both - log_split, log d = log_both + log_split
        self._log_both = self._log_split = 0.0
        self._recent: deque[float] = deque(maxlen=_WINDOW)
        self._recent_plain: deque[float] = deque(maxlen=_WINDOW)
        self._seen: set[int] = set()
        # Moving average of the fraction of a step's time that d scales.
        self._mean_fraction: float | None = None

    @property
    def root(self) -> float:
        """c: scales the time of a step with one row for each request."""
        return math.exp(self._log_both - self._log_split)

    @property
    def added(self) -> float:
        """d: scales what further rows add to that."""
        return math.exp(self._log_both + self._log_split)

    def observe(self, size: int, root_ms: float, added_ms: float, measured_ms: float) -> None:
        """Learn from the forward pass of a tree step.

        Args:
            size: its rows after padding.
            root_ms: uncorrected time of a row for each request.
            added_ms: uncorrected time that its other rows add.
            measured_ms: what it took.
        """
        predicted = self.root * root_ms + self.added * added_ms
        ratio = measured_ms / predicted
        if not (math.isfinite(ratio) and ratio > 0):
            return
        if size not in self._seen:
            self._seen.add(size)
            return
        started = len(self._recent) == _WINDOW
        self._recent.append(ratio)
        middle = median(self._recent)
        fraction = self.added * added_ms / predicted
        if not started or self._mean_fraction is None:
            # A bare roofline can be far off: start from the observed ratio, not from one.
            self._scale(middle)
            self._mean_fraction = fraction
            return
        deviation = min(max(ratio / middle, 1 / _OUTLIER), _OUTLIER)
        middle = min(max(middle, 1 / _MAX_PULL), _MAX_PULL)
        slope = 0.5 * _BETA * (deviation - 1.0) * (fraction - self._mean_fraction)
        self._log_split = min(max(self._log_split + slope, -_MAX_LOG_SPLIT), _MAX_LOG_SPLIT)
        self._mean_fraction += self._alpha * (fraction - self._mean_fraction)
        self._scale(1.0 + self._alpha * (middle * deviation - 1.0))

    def observe_plain(self, ratio: float) -> None:
        """Learn from a plain step: the whole time observed, over the time expected.

        Otherwise the cost of drafting would stay what it was when drafting stopped.
        """
        self._recent_plain.append(ratio)
        middle = median(self._recent_plain)
        if len(self._recent_plain) == _WINDOW and math.isfinite(middle) and middle > 0:
            middle = min(max(middle, 1 / _MAX_PULL), _MAX_PULL)
            self._scale(1.0 + self._alpha * (middle - 1.0))

    def _scale(self, factor: float) -> None:
        self._log_both += math.log(factor)
        # Recent ratios were taken against the previous prediction.
        for i, ratio in enumerate(self._recent):
            self._recent[i] = ratio / factor
