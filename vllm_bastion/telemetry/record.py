# SPDX-License-Identifier: Apache-2.0
"""The record of one step, and the published sums over steps.

Kinds of steps:

    tree     verifies nodes of draft trees
    n-gram   verifies n-gram drafts alone
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
from typing import Any

# Seconds between two sums while requests run.
PERIOD = 1.0
# Records that may wait to be added up: many at once take less time than one by one.
MOST_PENDING = 128
# Bucket i of the histogram of nodes holds trees of at most 2**i nodes, and more than 2**(i - 1).
NODE_BUCKETS = 11
# Where a node comes from: the drafter alone, an n-gram draft alone, or both.
SOURCES = ("drafter", "lookup", "both")


def bucket_of(count: int) -> int:
    """Index of the smallest power of two that is not below `count`, for `count` >= 1."""
    return (count - 1).bit_length()


@dataclass(slots=True)
class StepRecord:
    """What the engine core knows about one step."""

    kind: str = "prompt"
    reason: str = ""
    # Requests that the step gave tokens to.
    requests: int = 0
    # [T] nodes verified of each request that verified any, and the draft tokens accepted of these
    # that its client gets: a stop may cut off the last ones.
    nodes: Sequence[int] = ()
    accepted: Sequence[int] = ()
    # Draft tokens expected to be accepted, the sum of path scores. 0 with a fixed budget.
    expected: float = 0.0
    # Milliseconds since the step before; 0 where the gate does not use the time.
    ms: float = 0.0
    # Nodes verified, then draft tokens accepted, of each of SOURCES; empty without lookup.
    sources: Sequence[int] = ()


def drafted(steps: Sequence[StepRecord]) -> tuple[int, int]:
    """Trees of steps that verified nodes of the drafter, and how many of these were accepted.

    An n-gram draft carries no signal about the drafter.
    """
    trees = tokens = 0
    without_sources: list[int] = []
    for step in steps:
        if not step.sources:
            without_sources += step.accepted
            continue
        by_drafter, _, by_both, accepted, _, accepted_of_both = step.sources
        if by_drafter or by_both:
            trees += len(step.nodes)
            tokens += accepted + accepted_of_both
    return trees + len(without_sources), tokens + sum(without_sources)


@dataclass
class Totals:
    """Sums over steps. Every field but `gain` only grows."""

    # (kind, reason) -> steps
    steps: dict[tuple[str, str], int] = field(default_factory=dict)
    # Times that a step gave a request tokens: one of them, and the accepted ones.
    request_steps: int = 0
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
    expected: float = 0.0
    # kind -> steps whose time the gate uses, and their milliseconds
    times: dict[str, tuple[int, float]] = field(default_factory=dict)
    # The gate's gain over plain decoding; None while it is not measured.
    gain: float | None = None

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
        self.request_steps += sum([step.requests for step in steps])
        self.expected += sum([step.expected for step in steps])
        for step in steps:
            if step.sources:
                self.sources = _added(self.sources, step.sources)
            if step.ms:
                self._add_time(step.kind, 1, step.ms)

    def _add_steps(self, counts: dict[tuple[str, str], int]) -> None:
        for key, count in counts.items():
            self.steps[key] = self.steps.get(key, 0) + count

    def _add_time(self, kind: str, steps: int, ms: float) -> None:
        before = self.times.get(kind, (0, 0.0))
        self.times[kind] = before[0] + steps, before[1] + ms

    def merge(self, other: Totals) -> None:
        """Add another sum."""
        self._add_steps(other.steps)
        for name in ("request_steps", "trees", "nodes", "accepted", "expected"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("trees_by_nodes", "trees_by_depth", "sources"):
            setattr(self, name, _added(getattr(self, name), getattr(other, name)))
        for kind, (steps, ms) in other.times.items():
            self._add_time(kind, steps, ms)
        self.gain = other.gain

    @property
    def accepted_by_depth(self) -> list[int]:
        """[depth] trees whose accepted path reaches depth 1, 2, and so on."""
        counts, reached = [], 0
        for trees in reversed(self.trees_by_depth[1:]):
            reached += trees
            counts.append(reached)
        return counts[::-1]

    def steps_of(self, *kinds: str) -> int:
        """Steps of these kinds."""
        return sum(count for (kind, _), count in self.steps.items() if kind in kinds)

    def to_plain(self) -> dict[str, Any]:
        """As lists and dicts with string keys, for msgpack and JSON; see `from_plain`."""
        return {**asdict(self), "steps": [[*key, count] for key, count in self.steps.items()]}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Totals:
        """The inverse of `to_plain`."""
        steps = {(kind, reason): count for kind, reason, count in plain["steps"]}
        times = {kind: (count, ms) for kind, (count, ms) in plain["times"].items()}
        return cls(**{**plain, "steps": steps, "times": times})


def _added(first: Sequence[int], second: Sequence[int]) -> list[int]:
    """The element-wise sum; the shorter list is padded with zeros."""
    return [a + b for a, b in zip_longest(first, second, fillvalue=0)]
