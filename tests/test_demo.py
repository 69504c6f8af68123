# SPDX-License-Identifier: Apache-2.0
"""`make demo`: which pair it uses, and what it prints."""

from __future__ import annotations

import math
from dataclasses import replace

from benchmarks.demo.drawing import draw_tree
from benchmarks.probes import SeenTree


def test_a_tree_is_drawn_with_its_accepted_path() -> None:
    # a - b - c with a second child d of the root and e of a; f is not verified.
    seen = SeenTree(
        request=0, position=1, root=ord("\n"), tokens=[*map(ord, "abcdef")],
        parents=[0, 1, 2, 0, 1, 5],
        log_rho=[math.log(rho) for rho in (0.5, 0.4, 0.3, 0.25, 0.05, 0.01)], num_verified=5,
        path=[0, 1, 5], emitted=[0],
    )  # fmt: skip
    assert draw_tree(seen, chr) == [
        "● ↵", "├─● a  0.5", "│ ├─○ b c  0.3", "│ └─● e  0.05", "└─○ d  0.25",
    ]  # fmt: skip
    drawn = "".join(draw_tree(seen, lambda token: "\x07 "))
    assert "\x07" not in drawn and "·" in drawn
    assert draw_tree(replace(seen, num_verified=0, path=[0]))[1:] == []
