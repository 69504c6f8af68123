# SPDX-License-Identifier: Apache-2.0
"""The target's forward pass by rows, requests and cached tokens, from measured samples.

    T(rows, R, cached) = G(rows) + D_R(rows, cached)

G is the time at each measured number of rows with the shortest context measured there. It is mostly
matrix products, and steps up where a tile or a graph is full. D is what a longer context adds. D
depends on how the rows are divided among requests (a tree reads one request's cache, 64 requests of
one row each read 64), so there is a D for each measured number of requests R, interpolated in
log R between them, and between the rows that were measured with context. The context axis is
R * c, the cached tokens of the whole batch: what is read.
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
    """A latency curve of which only differences are used, not absolute values."""

    def predict_ms(self, rows: FloatArray, context_len: float, num_reqs: int = 1) -> FloatArray:
        """Milliseconds of the target's forward pass at each of `rows` (float64, same shape)."""
        ...


class ForwardTimes:
    """See the module docstring.

    Args:
        samples: at least one; repeated points are reduced to their median.
        carrier: its differences extrapolate beyond the measured contexts; None: constant there.
    """

    def __init__(self, samples: Sequence[Sample], carrier: Carrier | None) -> None:
        self._carrier = carrier
        columns = _columns(samples)
        # rows -> the shortest context measured there (in cached tokens), and the time
        shortest: dict[int, tuple[float, float]] = {}
        for (_, rows), (cached, times) in columns.items():
            first = (float(cached[0]), float(times[0]))
            shortest[rows] = min(first, shortest.get(rows, first))
        # [P] float64 measured numbers of rows, ascending, and G there
        self.rows = np.array(sorted(shortest), dtype=np.float64)
        self._base = _monotone([shortest[rows][1] for rows in sorted(shortest)])
        base = dict(zip(sorted(shortest), self._base.tolist(), strict=True))
        # requests -> rows -> (cached tokens [k] ascending, D [k])
        added: dict[int, dict[int, tuple[FloatArray, FloatArray]]] = {}
        for (reqs, rows), (cached, times) in columns.items():
            over = times - base[rows]
            if shortest[rows][0] < cached[0]:  # for every R, D is 0 where G was measured
                cached, over = np.append(shortest[rows][0], cached), np.append(0.0, over)
            added.setdefault(reqs, {})[rows] = (cached, over)
        # Samples without context contain nothing about D.
        with_context = {
            reqs: {rows: column for rows, column in by_rows.items() if column[0][-1]}
            for reqs, by_rows in added.items()
        }
        self._added = {reqs: by_rows for reqs, by_rows in with_context.items() if by_rows} or added
        self._reqs = sorted(self._added)

    def ms(self, num_reqs: int, cached: float) -> FloatArray:
        """Milliseconds at each of `rows`, [P] float64.

        Args:
            num_reqs: R.
            cached: cached tokens of all requests together.
        """
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
            measured, added = by_rows[rows]
            value = float(np.interp(cached, measured, added))
            edge = float(np.clip(cached, measured[0], measured[-1]))
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
    """(requests, rows) -> (cached tokens [k] ascending, times [k]), monotone in both."""
    groups: dict[tuple[int, float], dict[int, list[float]]] = {}
    for rows, context, ms, reqs in samples:
        groups.setdefault((reqs, context * reqs), {}).setdefault(rows, []).append(ms)
    # Noise must not make a larger step look cheaper: first monotone over rows ...
    columns: dict[tuple[int, int], dict[float, float]] = {}
    for (reqs, cached), by_rows in groups.items():
        here = sorted(by_rows)
        for rows, ms in zip(here, _monotone([median(by_rows[n]) for n in here]), strict=True):
            columns.setdefault((reqs, rows), {})[cached] = float(ms)
    # ... and then over contexts.
    return {
        key: (np.array(sorted(times)), _monotone([times[cached] for cached in sorted(times)]))
        for key, times in columns.items()
    }


def _monotone(values: Sequence[float]) -> FloatArray:
    """Non-decreasing least-squares fit; in a running maximum one outlier would raise all others."""
    from scipy.optimize import isotonic_regression

    return np.asarray(isotonic_regression(values).x, dtype=np.float64)
