# SPDX-License-Identifier: Apache-2.0
"""The target's forward pass by rows, requests and cached tokens, from measured samples.

    T(rows, R, cached) = G(rows) + D_R(rows, cached)

G is a time at every measured number of rows, over the least context that was measured there: its
matrix products, which step up where a tile or a graph is full. D is what the context adds to it.
That depends on how the rows are shared out (a tree reads its request's cache once, 64 requests of
one row read 64), so it is kept for each measured number of requests, and between two of them it is
interpolated in log R. The context axis is the batch's cached tokens, R * c, which is what is read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
# target rows, mean cached tokens per request, milliseconds, requests
Sample = tuple[int, float, float, int]


class Carrier(Protocol):
    """A latency curve that is trusted for differences, not for absolute values."""

    def predict_ms(self, rows: FloatArray, context_len: float, num_reqs: int = 1) -> FloatArray:
        """Milliseconds of the target's forward pass at each of `rows` (float64, same shape)."""
        ...


class ForwardTimes:
    """See the module docstring.

    Args:
        samples: at least one; repeated points are reduced to their median.
        carrier: adds its difference beyond the measured contexts; None: level there.
    """

    def __init__(self, samples: Sequence[Sample], carrier: Carrier | None) -> None:
        self._carrier = carrier
        columns = _columns(samples)
        # rows -> the least context measured there, and the time
        least: dict[int, tuple[float, float]] = {}
        for (_, rows), (at, times) in columns.items():
            first = (float(at[0]), float(times[0]))
            least[rows] = min(first, least.get(rows, first))
        # [P] float64 measured numbers of rows, ascending, and G there
        self.rows = np.array(sorted(least), dtype=np.float64)
        self._base = _monotone([least[rows][1] for rows in sorted(least)])
        base = dict(zip(sorted(least), self._base.tolist(), strict=True))
        # requests -> rows -> (cached tokens [k] ascending, D [k])
        self._added: dict[int, dict[int, tuple[FloatArray, FloatArray]]] = {}
        for (reqs, rows), (at, times) in columns.items():
            added = times - base[rows]
            if least[rows][0] < at[0]:  # D is 0 where G was measured, whatever the batch
                at, added = np.append(least[rows][0], at), np.append(0.0, added)
            self._added.setdefault(reqs, {})[rows] = (at, added)
        with_context = {
            reqs for reqs, by_rows in self._added.items() for at, _ in by_rows.values() if at[-1]
        }
        # A batch that was only measured without context says nothing about what it adds.
        self._reqs = sorted(with_context) or sorted(self._added)

    def at(self, num_reqs: int, cached: float) -> FloatArray:
        """[P] float64 milliseconds at each of `rows`; cached: tokens of all requests together."""
        above = int(np.searchsorted(self._reqs, num_reqs))
        high = self._reqs[min(above, len(self._reqs) - 1)]
        low = high if high == num_reqs else self._reqs[max(above - 1, 0)]
        added = self._added_ms(low, num_reqs, cached)
        if low != high:
            share = math.log(num_reqs / low) / math.log(high / low)
            added = added + share * (self._added_ms(high, num_reqs, cached) - added)
        return self._base + added

    def _added_ms(self, measured_reqs: int, num_reqs: int, cached: float) -> FloatArray:
        """D of a measured number of requests, at every measured number of rows."""
        by_rows = self._added[measured_reqs]
        points = sorted(by_rows)
        values = []
        for rows in points:
            at, added = by_rows[rows]
            value = float(np.interp(cached, at, added))
            edge = float(np.clip(cached, at[0], at[-1]))
            if edge != cached and self._carrier is not None:
                row = np.array([float(rows)])
                there = self._carrier.predict_ms(row, cached / num_reqs, num_reqs)
                here = self._carrier.predict_ms(row, edge / num_reqs, num_reqs)
                value += float(there[0] - here[0])
            values.append(value)
        return np.interp(self.rows, points, values)


def _columns(
    samples: Sequence[Sample],
) -> dict[tuple[int, int], tuple[FloatArray, FloatArray]]:
    """(requests, rows) -> (cached tokens [k] ascending, times [k]), free of steps down."""
    groups: dict[tuple[int, float], dict[int, list[float]]] = {}
    for rows, context, ms, reqs in samples:
        groups.setdefault((reqs, context * reqs), {}).setdefault(rows, []).append(ms)
    # Noise must not become a step down: monotone over rows for each batch and context ...
    columns: dict[tuple[int, int], dict[float, float]] = {}
    for (reqs, cached), by_rows in groups.items():
        here = sorted(by_rows)
        for rows, ms in zip(here, _monotone([median(by_rows[n]) for n in here]), strict=True):
            columns.setdefault((reqs, rows), {})[cached] = float(ms)
    # ... and then over contexts.
    return {
        key: (np.array(sorted(times)), _monotone([times[at] for at in sorted(times)]))
        for key, times in columns.items()
    }


def _monotone(values: Sequence[float]) -> FloatArray:
    """Least-squares fit that never falls: a running maximum would let one outlier lift the rest."""
    from scipy.optimize import isotonic_regression

    return np.asarray(isotonic_regression(values).x, dtype=np.float64)
