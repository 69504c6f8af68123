# SPDX-License-Identifier: Apache-2.0
"""The record of one step, and the published sums over steps.

Kinds of steps:

    tree     verifies nodes of draft trees
    chain    verifies drafts of width 1, whose rows are causal
    plain    decodes, and verifies nothing
    prompt   has prompt rows only

A step's reason is why it has drafts, or why it has none; see `docs/metrics.md` for the list.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, zip_longest
from typing import Any, NamedTuple

# Seconds between two sums while requests run.
PERIOD = 1.0
# Records that may wait to be added up: many at once take less time than one by one.
MOST_PENDING = 128
# Bucket i of the histogram of nodes holds trees of at most 2**i nodes, and more than 2**(i - 1).
NODE_BUCKETS = 11
# Where a node comes from: the drafter alone, a copy of the context alone, or both.
SOURCES = ("drafter", "lookup", "both")


def bucket_of(count: int) -> int:
    """Index of the smallest power of two that is not below `count`, for `count` >= 1."""
    return (count - 1).bit_length()


class StepTime(NamedTuple):
    """A whole step that was timed, read some steps later."""

    kind: str
    rows: int
    predicted_ms: float
    measured_ms: float


@dataclass(slots=True)
class StepRecord:
    """What the worker knows about one step. Numbers and strings only: it is sent as it is."""

    kind: str = "prompt"
    reason: str = ""
    # Requests that decode, and all target rows of the step.
    requests: int = 0
    rows: int = 0
    # [T] nodes verified and draft tokens accepted of each request that verified any.
    nodes: Sequence[int] = ()
    accepted: Sequence[int] = ()
    # For trees of earlier steps: draft tokens expected to be accepted (the sum of their path
    # scores), and accepted ones. Only with an adaptive budget.
    promised: float = 0.0
    yielded: float = 0.0
    # Milliseconds that plain decoding is estimated to need for the step's tokens, and that the step
    # is estimated to take; both 0 where that is unknown.
    plain_ms: float = 0.0
    step_ms: float = 0.0
    times: Sequence[StepTime] = ()
    # Latest values of the gauges by name; None in most steps.
    now: dict[str, float] | None = None
    # Nodes verified, then draft tokens accepted, of each of SOURCES; empty without lookup.
    sources: Sequence[int] = ()


def drafted(steps: Sequence[StepRecord]) -> tuple[int, int]:
    """Trees of steps that verified nodes of the drafter, and how many of these were accepted.

    A copy of the context says nothing about the drafter.
    """
    trees = tokens = 0
    without_copies: list[int] = []
    for step in steps:
        if not step.sources:
            without_copies += step.accepted
            continue
        by_drafter, _, by_both, accepted, _, accepted_of_both = step.sources
        if by_drafter or by_both:
            trees += len(step.nodes)
            tokens += accepted + accepted_of_both
    return trees + len(without_copies), tokens + sum(without_copies)


@dataclass
class Totals:
    """Sums over steps. Every field but `now` only grows."""

    # (kind, reason) -> steps
    steps: dict[tuple[str, str], int] = field(default_factory=dict)
    # Trees that were verified, their nodes, and the draft tokens accepted of them.
    trees: int = 0
    nodes: int = 0
    accepted: int = 0
    # [NODE_BUCKETS] trees by verified nodes, see `bucket_of`.
    trees_by_nodes: list[int] = field(default_factory=lambda: [0] * NODE_BUCKETS)
    # [depth + 1] trees by accepted depth; entry 0 counts trees without an accepted token.
    trees_by_depth: list[int] = field(default_factory=list)
    # [6] as in a record.
    sources: list[int] = field(default_factory=lambda: [0] * 2 * len(SOURCES))
    promised: float = 0.0
    yielded: float = 0.0
    plain_ms: float = 0.0
    step_ms: float = 0.0
    # (kind, power of two not below the rows) -> steps, predicted and measured milliseconds
    times: dict[tuple[str, int], tuple[int, float, float]] = field(default_factory=dict)
    now: dict[str, float] = field(default_factory=dict)

    def add(self, steps: Sequence[StepRecord]) -> None:
        """Add some steps."""
        self._add_steps(Counter([(step.kind, step.reason) for step in steps]))
        nodes = list(chain.from_iterable([step.nodes for step in steps]))
        accepted = list(chain.from_iterable([step.accepted for step in steps]))
        for count, trees in Counter(nodes).items():
            self.trees_by_nodes[min(bucket_of(count), NODE_BUCKETS - 1)] += trees
        if accepted:
            self.trees_by_depth += [0] * (max(accepted) + 1 - len(self.trees_by_depth))
        for depth, trees in Counter(accepted).items():
            self.trees_by_depth[depth] += trees
        self.trees += len(nodes)
        self.nodes += sum(nodes)
        self.accepted += sum(accepted)
        self.promised += sum([step.promised for step in steps])
        self.yielded += sum([step.yielded for step in steps])
        self.plain_ms += sum([step.plain_ms for step in steps])
        self.step_ms += sum([step.step_ms for step in steps])
        for step in steps:
            if step.sources:
                self.sources = _added(self.sources, step.sources)
            for kind, rows, predicted, measured in step.times:
                self._add_time((kind, 1 << bucket_of(rows)), (1, predicted, measured))
            if step.now is not None:
                self.now = step.now

    def _add_steps(self, counts: dict[tuple[str, str], int]) -> None:
        for key, count in counts.items():
            self.steps[key] = self.steps.get(key, 0) + count

    def _add_time(self, key: tuple[str, int], values: tuple[int, float, float]) -> None:
        steps, predicted, measured = self.times.get(key, (0, 0.0, 0.0))
        self.times[key] = (steps + values[0], predicted + values[1], measured + values[2])

    def merge(self, other: Totals) -> None:
        """Add another sum."""
        self._add_steps(other.steps)
        for name in _NUMBERS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("trees_by_nodes", "trees_by_depth", "sources"):
            setattr(self, name, _added(getattr(self, name), getattr(other, name)))
        for row, values in other.times.items():
            self._add_time(row, values)
        self.now = other.now or self.now

    @property
    def accepted_by_depth(self) -> list[int]:
        """[depth] trees whose accepted path reaches depth 1, 2, and so on."""
        counts, reached = [], 0
        for trees in reversed(self.trees_by_depth[1:]):
            reached += trees
            counts.append(reached)
        return counts[::-1]

    @property
    def gain(self) -> float | None:
        """Estimated speed-up over plain decoding, as a factor; None while it is unknown."""
        return self.plain_ms / self.step_ms if self.step_ms > 0 else None

    def steps_of(self, *kinds: str) -> int:
        """Steps of these kinds."""
        return sum(count for (kind, _), count in self.steps.items() if kind in kinds)

    def to_plain(self) -> dict[str, Any]:
        """As lists and dicts with string keys, for msgpack and JSON; see `from_plain`."""
        return {
            **asdict(self),
            "steps": [[*key, count] for key, count in self.steps.items()],
            "times": [[*key, *values] for key, values in self.times.items()],
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Totals:
        """The inverse of `to_plain`."""
        steps = {(kind, reason): count for kind, reason, count in plain["steps"]}
        times = {
            (kind, rows): (count, predicted, measured)
            for kind, rows, count, predicted, measured in plain["times"]
        }
        return cls(**{**plain, "steps": steps, "times": times})


# Fields of `Totals` that are added up.
_NUMBERS = (
    "trees", "nodes", "accepted", "promised", "yielded", "plain_ms", "step_ms",
)  # fmt: skip


def _added(first: Sequence[int], second: Sequence[int]) -> list[int]:
    """The element-wise sum; the shorter list is padded with zeros."""
    return [a + b for a, b in zip_longest(first, second, fillvalue=0)]
