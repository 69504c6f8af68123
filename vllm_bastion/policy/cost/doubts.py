# SPDX-License-Identifier: Apache-2.0
"""Measured times that cannot all be true, and what to use instead.

More rows, or more cached tokens, never make a step much cheaper, and other work on the machine only
adds to a measured time. So where two times contradict each other, the larger one is wrong: it is
replaced by the smallest time of any larger step. Repeats that disagree count as their lower
quartile.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from vllm_bastion.policy.cost.forward_times import Sample

# Ordinary noise stays below both: neither a ratio nor, for the shortest steps, a difference in ms.
_RATIO, _LEAST_MS = 1.5, 0.5
_REPEATS_RATIO = 2.0

# rows, cached tokens of each request, requests
Point = tuple[int, float, int]


@dataclass(frozen=True)
class Doubt:
    """A point whose time contradicts another one.

    Attributes:
        point: rows, cached tokens of each request, requests.
        ms: the median of its repeats.
        used_ms: the time used instead.
        against: what contradicts it.
    """

    point: Point
    ms: float
    used_ms: float
    against: str

    def text(self) -> str:
        """For a log and for `vllm-bastion show`."""
        rows, context, reqs = self.point
        where = f" ({_requests(reqs)}, {context:.0f} cached tokens each)" if context else ""
        return (
            f"{_rows(rows)}{where} took {self.ms:.4g} ms, but {self.against}; "
            f"{self.used_ms:.4g} ms are used"
        )


def doubts(samples: Iterable[Sample]) -> list[Doubt]:
    """The points of measured forward passes that contradict others, in order."""
    times: dict[Point, list[float]] = {}
    for rows, context, ms, reqs in samples:
        times.setdefault((rows, context, reqs), []).append(ms)
    middle = {point: median(values) for point, values in times.items()}
    found = []
    for point in sorted(times):
        low = sorted(times[point])[len(times[point]) // 4]
        if _exceeds(middle[point], min(times[point]), _REPEATS_RATIO):
            found.append(Doubt(point, middle[point], low, f"{low:.4g} ms at other times"))
        larger = min(
            (p for p in times if _is_larger(p, point)), key=middle.__getitem__, default=None
        )
        if larger is not None and _exceeds(middle[point], middle[larger], _RATIO):
            rows, context, _ = larger
            what = _rows(rows) if rows > point[0] else f"with {context:.0f} cached tokens they"
            against = f"{what} took {middle[larger]:.4g}"
            if found and found[-1].point == point:
                found.pop()
            found.append(Doubt(point, middle[point], middle[larger], against))
    return found


def settled(samples: Sequence[Sample]) -> list[Sample]:
    """The samples, with one sample of the time to use at each doubtful point."""
    replaced = {doubt.point: doubt.used_ms for doubt in doubts(samples)}
    kept = [s for s in samples if (s[0], s[1], s[3]) not in replaced]
    return kept + [(rows, context, ms, reqs) for (rows, context, reqs), ms in replaced.items()]


def settled_by_requests(times: Sequence[float]) -> list[float]:
    """Times by a growing number of requests, each at most what a larger number took, if far off."""
    out, least = [], float("inf")
    for ms in reversed(times):
        out.append(least if _exceeds(ms, least, _RATIO) else ms)
        least = min(least, out[-1])
    return out[::-1]


def _is_larger(one: Point, other: Point) -> bool:
    """Whether a step of `one` computes strictly more than one of `other`."""
    rows, context, reqs = one
    if one[:2] == other[:2] or rows < other[0] or context < other[1]:
        return False
    # Without context the rows alone matter; requests share out what is cached.
    return reqs == other[2] or (context == other[1] == 0)


def _exceeds(ms: float, bound: float, ratio: float) -> bool:
    return ms > ratio * bound and ms > bound + _LEAST_MS


def _rows(count: int) -> str:
    return f"{count} row{'s' if count > 1 else ''}"


def _requests(count: int) -> str:
    return f"{count} request{'s' if count > 1 else ''}"
