# SPDX-License-Identifier: Apache-2.0
"""The last verified trees with their tokens, for the page.

Reading a tree from the device makes the host wait. So trees are kept only while the page polls: a
few for each poll, and none after some seconds without one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

# Trees that are kept for each poll, and in all.
PER_LOOK, KEPT = 8, 24
# Seconds after a poll during which trees are kept.
LOOK_S = 5.0


@dataclass(frozen=True)
class SeenTree:
    """One verified tree. Node 0 is the root; entry j of a list is node j + 1.

    Attributes:
        request: id of the request in the engine.
        root: token of the root.
        tokens: tokens of the verified nodes.
        parents: number of each node's parent.
        scores: path score of each node, from 0 to 1.
        path: accepted node numbers from the root down, without the root.
        emitted: tokens that the step emitted: those of the path, then the target's own.
        sources: of each node: 1 the drafter, 2 a copy of the context, 3 both; empty without lookup.
    """

    request: str
    root: int
    tokens: list[int]
    parents: list[int]
    scores: list[float]
    path: list[int]
    emitted: list[int]
    sources: list[int] = field(default_factory=list)


class SeenTrees:
    """Keeps the last trees of one request at a time.

    Args:
        clock: seconds; for tests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._trees: deque[SeenTree] = deque(maxlen=KEPT)
        self._wanted, self._until = 0, -float("inf")

    def look(self) -> list[dict[str, Any]]:
        """The kept trees, oldest first, as plain values. More are kept from now on."""
        self._wanted, self._until = PER_LOOK, self._clock() + LOOK_S
        return [asdict(tree) for tree in self._trees]

    def wanted(self) -> bool:
        """Whether a tree of the current step would be kept."""
        return self._wanted > 0 and self._clock() < self._until

    def choose(self, requests: Sequence[str], nodes: Sequence[int]) -> int | None:
        """Which of a step's requests to show: the one shown last, else one with the most nodes.

        Args:
            requests: [R] ids.
            nodes: [R] nodes verified of each.

        Returns:
            Its index, or None if no tree was verified.
        """
        last = self._trees[-1].request if self._trees else None
        if last in requests and nodes[requests.index(last)]:
            return requests.index(last)
        best = max(range(len(nodes)), key=lambda row: nodes[row], default=None)
        return best if best is not None and nodes[best] else None

    def add(self, tree: SeenTree) -> None:
        """Keep a tree."""
        self._wanted -= 1
        self._trees.append(tree)
