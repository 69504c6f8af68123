# SPDX-License-Identifier: Apache-2.0
"""What a step costs by its target rows, from measured samples: the truth of a replay.

A forward pass of n rows over R requests takes G(n) + D_R(n, cached): G is the time with the
shortest context measured at n rows, D what longer contexts add, interpolated in the cached tokens
of the batch and in log R. With CUDA graphs a step is padded to the next captured size.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from statistics import median

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


class StepCostTable:
    """Milliseconds of a step.

    Args:
        samples: `(target rows, mean cached tokens, forward ms[, requests])`.
        drafter_samples: `(requests, ms)` of a drafter's pass; empty: no drafter time.
        aux_ms: time of a step with trees that is neither (sampling, tree building, compaction).
        max_rows: most target rows of a step.
        captured_sizes: sizes of the CUDA graphs; empty: no graphs.
        plain_aux_ms: `aux_ms` of a step that drafts nothing; default: `aux_ms`.
    """

    def __init__(
        self,
        samples: Iterable[Sequence[float]],
        drafter_samples: Iterable[Sequence[float]] = (),
        aux_ms: float = 0.0,
        *,
        max_rows: int,
        captured_sizes: Sequence[int] = (),
        plain_aux_ms: float | None = None,
    ) -> None:
        self.max_rows, self.aux_ms = max_rows, aux_ms
        self.plain_aux_ms = aux_ms if plain_aux_ms is None else plain_aux_ms
        self.captured_sizes = tuple(captured_sizes)
        self._padded = _padded_rows(max_rows, captured_sizes)
        self._drafter = sorted((float(reqs), float(ms)) for reqs, ms in drafter_samples)
        # requests -> cached tokens -> rows -> ms
        by_reqs: dict[int, dict[float, dict[int, list[float]]]] = defaultdict(
            lambda: defaultdict(lambda: defaultdict(list))
        )
        for rows, context, ms, *rest in samples:
            reqs = int(rest[0]) if rest else 1
            by_reqs[reqs][reqs * context][int(rows)].append(ms)
        shortest: dict[int, tuple[float, float]] = {}
        for curves in by_reqs.values():
            for cached, by_rows in curves.items():
                for rows, times in by_rows.items():
                    point = cached, median(times)
                    shortest[rows] = min(point, shortest.get(rows, point))
        self._rows = np.array(sorted(shortest), dtype=np.float64)
        self._base = _monotone([shortest[int(rows)][1] for rows in self._rows])
        # requests -> [(cached tokens, rows [k], added ms [k])], where a context was measured
        self._added = {
            reqs: [
                (cached, np.array(sorted(by_rows), dtype=np.float64), self._over(by_rows))
                for cached, by_rows in sorted(curves.items())
                if cached
            ]
            for reqs, curves in by_reqs.items()
            if any(curves)
        }
        self.forward_ms = lru_cache(512)(self._forward_ms)

    @classmethod
    def linear(
        cls, base_ms: float, per_row_ms: float, *, max_rows: int, drafter_ms: float = 0.0,
        aux_ms: float = 0.0, captured_sizes: Sequence[int] = (),
    ) -> StepCostTable:  # fmt: skip
        """A forward pass of n rows costs `base_ms + per_row_ms * n`."""
        points = sorted({1, max(max_rows, 2), *captured_sizes})
        return cls(
            [(n, 0, base_ms + per_row_ms * n) for n in points],
            [(1, drafter_ms)] if drafter_ms > 0 else (),
            aux_ms,
            max_rows=max_rows,
            captured_sizes=captured_sizes,
        )

    def _over(self, by_rows: dict[int, list[float]]) -> FloatArray:
        """What these times are above the base."""
        rows = sorted(by_rows)
        over = [median(by_rows[n]) for n in rows] - np.interp(rows, self._rows, self._base)
        return np.asarray(np.maximum(over, 0.0))

    def _forward_ms(self, num_reqs: int, context_len: float) -> FloatArray:
        """[max_rows + 1] ms of the target's forward pass, by target rows."""
        at_points = self._base + self._added_ms(num_reqs, num_reqs * context_len)
        out = np.interp(self._padded, self._rows, at_points)
        if len(self._rows) > 1:
            slope = (at_points[-1] - at_points[-2]) / (self._rows[-1] - self._rows[-2])
            out = out + max(0.0, slope) * np.maximum(self._padded - self._rows[-1], 0.0)
        return np.asarray(np.maximum.accumulate(out))

    def _added_ms(self, num_reqs: int, cached: float) -> FloatArray:
        if not self._added:
            return np.zeros_like(self._rows)
        known = sorted(self._added)
        above = min(int(np.searchsorted(known, num_reqs)), len(known) - 1)
        high, low = known[above], known[max(above - 1, 0)]
        share = 1.0
        if low < num_reqs < high:
            share = math.log(num_reqs / low) / math.log(high / low)
        return share * self._of(high, cached) + (1.0 - share) * self._of(low, cached)

    def _of(self, reqs: int, cached: float) -> FloatArray:
        """What `cached` tokens add, by measured rows; beyond the longest context in proportion."""
        points = [0.0] + [tokens for tokens, _, _ in self._added[reqs]]
        values = [np.zeros_like(self._rows)]
        values += [np.interp(self._rows, rows, over) for _, rows, over in self._added[reqs]]
        if cached >= points[-1]:
            return np.asarray(values[-1] * cached / points[-1])
        i = int(np.searchsorted(points, cached, side="right"))
        part = (cached - points[i - 1]) / (points[i] - points[i - 1])
        return np.asarray(values[i - 1] + part * (values[i] - values[i - 1]))

    def drafter_ms(self, num_reqs: int) -> float:
        """Milliseconds of one drafter pass over `num_reqs` requests; 0 where none was measured."""
        if not self._drafter:
            return 0.0
        reqs, times = np.array(self._drafter).T
        times = np.maximum.accumulate(times)
        slope = 0.0 if len(reqs) < 2 else (times[-1] - times[-2]) / (reqs[-1] - reqs[-2])
        beyond = slope * max(num_reqs - reqs[-1], 0.0)
        return float(np.interp(num_reqs, reqs, times) + beyond)

    def tree_step_ms(self, num_reqs: int, context_len: float) -> FloatArray:
        """[max_rows + 1] ms of a step with trees."""
        forward = self.forward_ms(num_reqs, context_len)
        return np.asarray(forward + self.drafter_ms(num_reqs) + self.aux_ms)


def _monotone(values: Sequence[float]) -> FloatArray:
    """Non-decreasing least-squares fit: noise must not make a larger step look cheaper."""
    from scipy.optimize import isotonic_regression

    return np.asarray(isotonic_regression(values).x, dtype=np.float64)


def _padded_rows(max_rows: int, captured_sizes: Sequence[int]) -> FloatArray:
    rows = np.maximum(np.arange(max_rows + 1, dtype=np.float64), 1.0)
    if not captured_sizes:
        return rows
    sizes = np.array(sorted(captured_sizes), dtype=np.float64)
    index = np.searchsorted(sizes, rows)
    return np.where(index < len(sizes), sizes[np.minimum(index, len(sizes) - 1)], rows)
