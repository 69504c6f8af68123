# SPDX-License-Identifier: Apache-2.0
"""How real steps correct what a step is believed to cost.

The paper has one factor, c <- (1 - alpha) c + alpha * (observed / predicted), fed by the target's
forward time of real steps. It says which steps are dear and nothing of where a tree should end: a
step's first rows wait for memory, further ones for arithmetic, and a neighbour on the memory bus or
a lower clock changes one of the two.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

_ALPHA = 0.1
_WINDOW = 5
_MAX_PULL = 1.5
# How fast c and d part, how far, and how far an observation may be from the median of the last.
_BETA = 1.0
_MAX_APART = 0.5 * math.log(3.0)
_WIDTH = 1.15


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
        self._followed: deque[float] = deque(maxlen=_WINDOW)
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

    def follow(self, ratio: float) -> None:
        """Take in a step without a draft by its whole time, observed over expected.

        Else the costs of drafting would stay those of the moment in which it was given up.
        """
        self._followed.append(ratio)
        middle = median(self._followed)
        if len(self._followed) == _WINDOW and math.isfinite(middle) and middle > 0:
            middle = min(max(middle, 1 / _MAX_PULL), _MAX_PULL)
            self._scale(1.0 + self._alpha * (middle - 1.0))

    def _scale(self, factor: float) -> None:
        self._log_both += math.log(factor)
        # What was seen of late was seen beside another prediction.
        for i, ratio in enumerate(self._recent):
            self._recent[i] = ratio / factor
