# SPDX-License-Identifier: Apache-2.0
"""A draft tree drawn for a terminal."""

from __future__ import annotations

import math
from collections.abc import Callable

from benchmarks.probes import SeenTree


def draw_tree(seen: SeenTree, decode: Callable[[int], str] = str) -> list[str]:
    """The verified nodes: best child first, a run of single children on a line.

    Nodes of the accepted path have a filled dot; the number is the path score of a line's last one.

    Args:
        decode: text of a token id.
    """
    children: list[list[int]] = [[] for _ in range(seen.num_verified + 1)]
    for node in range(1, len(children)):
        children[seen.parents[node - 1]].append(node)
    lines = [f"● {_printable(decode(seen.root))}"]

    def draw(node: int, indent: str, last: bool) -> None:
        run, accepted = [node], node in seen.path
        while len(children[run[-1]]) == 1 and (children[run[-1]][0] in seen.path) == accepted:
            run.append(children[run[-1]][0])
        text = " ".join(_printable(decode(seen.tokens[one - 1])) for one in run)
        score = math.exp(seen.log_rho[run[-1] - 1])
        branch = "└─" if last else "├─"
        lines.append(f"{indent}{branch}{'●' if accepted else '○'} {text}  {score:.2g}")
        below = children[run[-1]]
        for child in below:
            draw(child, indent + ("  " if last else "│ "), child == below[-1])

    for child in children[0]:
        draw(child, "", child == children[0][-1])
    return lines


def _printable(text: str) -> str:
    """Make spaces and control characters visible, so that a token cannot break the drawing."""
    text = text.replace(" ", "·").replace("\n", "↵").replace("\t", "⇥")
    return "".join(char if char.isprintable() else "�" for char in text) or "∅"
