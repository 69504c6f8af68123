# SPDX-License-Identifier: Apache-2.0
"""Which steps a calibration times, and how often."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Each point is timed at most this often.
REPEATS = 3
# Rows to time if there are no captured sizes. A matrix unit's tile has 16 rows, and
# `bastion_kernels.cpu.linear` reads its weights once for 24 rows. One row more can cost as much as
# all of those, so both sides of a boundary are timed.
_EAGER_ROWS = (
    1, 2, 4, 8, 16, 17, 24, 25, 32, 33, 48, 64, 96, 128, 256, 512,
)  # fmt: skip
# Cached tokens per request.
CONTEXTS = (128, 4096)
# Batch sizes that are timed with context: plain steps, and tree steps with their most rows. On two
# cores 1,024 rows of a model with 135M parameters take 0.8 s.
PLAIN_REQS = (1, 4, 16, 64, 256)
_TREE_REQS = {1: math.inf, 4: math.inf, 16: math.inf, 64: 512}


def sizes_to_measure(captured: Sequence[int], max_rows: int) -> list[int]:
    """Rows to time: every captured size, and some beyond the last, where steps run without graphs.

    The cost jumps where graphs end. Costs are interpolated between measured sizes, so the first
    size beyond the graphs has one row more than the last: otherwise the jump would become a slope.
    """
    if not captured:
        return [n for n in _EAGER_ROWS if n <= max_rows]
    sizes = list(captured)
    beyond = captured[-1] + 1
    while beyond <= max_rows and len(sizes) < len(captured) + 4:
        sizes.append(beyond)
        beyond *= 2
    return [n for n in sizes if n <= max_rows]


def tree_shapes(nodes: int, max_rows: int, max_reqs: int) -> list[tuple[int, int]]:
    """(requests, nodes of each) to time: a few batch sizes, and trees up to the largest."""
    per_request = sorted({*(2**i - 1 for i in range(2, 10) if 2**i <= nodes), nodes})
    return [
        (reqs, n)
        for reqs, most in _TREE_REQS.items()
        for n in per_request
        if n >= 1 and reqs <= max_reqs and reqs * (1 + n) <= min(most, max_rows)
    ]


@dataclass(frozen=True)
class Limits:
    """The settings of an engine that limit which steps are timed."""

    max_num_tokens: int
    max_num_reqs: int
    max_model_len: int
    depth: int  # gamma
    tree_size: int  # nodes of a whole tree

    @property
    def batch_sizes(self) -> list[int]:
        """Batch sizes to time: the drafter's block of each request must fit into a step, too."""
        most = max(1, min(self.max_num_tokens // (1 + self.depth), self.max_num_reqs))
        return [reqs for reqs in PLAIN_REQS if reqs <= most]

    @property
    def largest_tree(self) -> int:
        """Nodes of the largest tree to time.

        A request needs room for its context, two roots, the tree and the accepted path.
        """
        return min(self.tree_size, self.max_model_len - self.depth - 4)

    @property
    def contexts(self) -> list[int]:
        """Cached tokens per request to time."""
        longest = max(1, self.max_model_len - self.depth - 3 - self.largest_tree)
        return sorted({min(context, longest) for context in CONTEXTS})
