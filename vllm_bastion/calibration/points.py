# SPDX-License-Identifier: Apache-2.0
"""Which steps a calibration times, and how often."""

from __future__ import annotations

# A point is timed so often, if that takes no longer than `_POINT_S` seconds; once at least. What
# a longer context adds is a difference that decides little.
REPEATS, REPEATS_FAR = 5, 2
_POINT_S = 0.4
# Sizes timed where there are no graphs to name them, and contexts (cached tokens per request). A
# matrix unit's tile is 16 rows, and `bastion_kernels.linear` reads its weights once for 24: one row
# more can cost what those do, so both sides are timed.
_EAGER_ROWS = (
    1, 2, 4, 8, 12, 16, 17, 20, 24, 25, 32, 33, 48, 49, 64, 65, 96, 128, 192, 256, 384, 512, 768,
    1024,
)  # fmt: skip
CONTEXTS = (128, 2048, 8192)
# Batches whose context is timed: decoding plainly, and with trees.
PLAIN_REQS = (1, 4, 16, 64, 256)
_TREE_REQS = (1, 4, 16)


def sizes_to_measure(captured: list[int], max_rows: int) -> list[int]:
    """Rows to time: every captured size, and beyond the last one, where steps run without graphs.

    Leaving graphs is a jump that no extrapolation finds, so the tail starts right behind it.
    """
    if not captured:
        return [n for n in _EAGER_ROWS if n <= max_rows]
    sizes = list(captured)
    beyond = captured[-1] + captured[-1] // 8
    while beyond < max_rows and len(sizes) < len(captured) + 4:
        sizes.append(beyond)
        beyond *= 2
    return [n for n in sizes if n <= max_rows]


def tree_shapes(nodes: int, max_rows: int, max_reqs: int) -> list[tuple[int, int]]:
    """(requests, nodes of each) to time: a few batches, trees from few nodes to the largest."""
    per_request = sorted({*(2**i - 1 for i in range(2, 10) if 2**i <= nodes), nodes})
    return [
        (reqs, n)
        for reqs in _TREE_REQS
        for n in per_request
        if n >= 1 and reqs <= max_reqs and reqs * (1 + n) <= max_rows
    ]


def repeats_after(seconds: float) -> int:
    """How often to time what took so long at first."""
    return max(1, min(REPEATS, int(_POINT_S / max(seconds, 1e-9))))
