# SPDX-License-Identifier: Apache-2.0
"""One recorded step, explained: why N* nodes, which ones, and what the target accepted.

    python -m benchmarks.replay.explain RECORDING.npz --step 12 [--tokenizer MODEL] [--out FOLDER]

The tree is the one that the engine would build (by its own op), the decision
the one that it would take (`choose_budget` on the profile's cost), the outcome the recorded one.
"""

from __future__ import annotations

import argparse
import html
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.replay.controller import ScoreOrder, best_size, order_scores, speedup_curve
from benchmarks.replay.draft_tree import best_first
from benchmarks.replay.plots import step_figure
from benchmarks.replay.recording import Recording, load_recording
from vllm_bastion.cli import newest_profile
from vllm_bastion.policy.cost.online import LatencyModel, TableLatency
from vllm_bastion.policy.cost.store import read_profile
from vllm_bastion.policy.cost.table import CostArray

TokenText = Callable[[int], str]

_COLUMN, _ROW, _BOX = 118, 24, 100
_STYLE = """
body { font: 14px system-ui, sans-serif; margin: 24px; color: #222; background: #fff; }
svg { display: block; margin-top: 12px; }
text { font: 11px ui-monospace, monospace; fill: #222; }
rect { fill: #e8eefc; stroke: #6b86c9; }
line { stroke: #b5b5b5; }
.unverified rect { fill: #f7f7f7; stroke: #ccc; stroke-dasharray: 3 2; }
.unverified text { fill: #999; }
.accepted rect { fill: #d3f0d3; stroke: #2e8b2e; stroke-width: 2; }
line.accepted { stroke: #2e8b2e; stroke-width: 2; }
"""


@dataclass(frozen=True)
class Node:
    """One draft node of the step."""

    token: int
    parent: int  # node number, 0 for the root
    depth: int
    rho: float
    accepted: bool


@dataclass(frozen=True)
class Explanation:
    """A step and the decision on it; node j of `nodes` has number j + 1."""

    title: str
    root_token: int
    bonus_token: int
    nodes: list[Node]
    order: ScoreOrder
    cost_ms: CostArray
    num_verified: int

    @property
    def accepted(self) -> list[Node]:
        """The accepted path, from the root down."""
        return [node for node in self.nodes if node.accepted]


def explain_step(
    recording: Recording, step: int, latency: LatencyModel, max_nodes: int
) -> Explanation:
    """Rebuild one recorded step as a batch of one.

    Raises:
        ValueError: there is no such step.
    """
    if not 0 <= step < recording.num_steps:
        raise ValueError(f"step {step} is not among the {recording.num_steps} recorded ones")
    tree = best_first(
        torch.from_numpy(recording.topk_tokens[step : step + 1].astype(np.int32)),
        torch.from_numpy(recording.scores[step : step + 1].astype(np.float32)),
        max_nodes,
    )
    used = slice(0, int(tree.num_nodes[0]))
    log_rho = tree.log_rho[0, used].numpy().astype(np.float64)
    q, p = int(recording.step_requests[step]), int(recording.step_positions[step])
    cost = latency.cycle_cost_ms(1, float(recording.context_lens[step]))
    order = order_scores(np.exp(log_rho)[None], [len(log_rho)])
    verified = best_size(speedup_curve(order, cost, 1))
    truth = recording.continuation(step).tolist()
    path, nodes = {0}, []
    for j, (token, parent, depth, score) in enumerate(
        zip(
            tree.tokens[0, used].tolist(),
            tree.parents[0, used].tolist(),
            tree.depths[0, used].tolist(),
            log_rho,
            strict=True,
        )
    ):
        hit = j < verified and parent in path and token == truth[depth - 1]
        if hit:
            path.add(j + 1)
        nodes.append(Node(token, parent, depth, float(np.exp(score)), hit))
    start = int(recording.token_offsets[q])
    return Explanation(
        title=f"request {recording.request_ids[q]} ({recording.domains[q]}), position {p}",
        root_token=int(recording.tokens[start + p - 1]),
        bonus_token=truth[len(path) - 1],
        nodes=nodes,
        order=order,
        cost_ms=cost,
        num_verified=verified,
    )


def explanation_text(step: Explanation, text: TokenText = str) -> str:
    """S(N), A-hat(N) and C(N) where they matter, and the accepted path."""
    curve = speedup_curve(step.order, step.cost_ms, 1)
    last = len(curve) - 1
    sizes = sorted({0, 1, step.num_verified, last, *(n for n in _powers(last))})
    lines = [step.title, "", "     N   A-hat(N)    C(N) ms   S(N) tokens/ms"]
    for n in sizes:
        mark = "  <- N*" if n == step.num_verified else ""
        lines.append(
            f"{n:6d}{step.order.expected[n]:11.3f}{step.cost_ms[1 + n]:11.3f}{curve[n]:17.5f}{mark}"
        )
    path = " ".join(repr(text(node.token)) for node in step.accepted)
    lines += [
        "",
        f"root {text(step.root_token)!r}; accepted {len(step.accepted)} of {step.num_verified} "
        f"verified nodes: {path or 'none'}; then {text(step.bonus_token)!r} from the target",
    ]
    return "\n".join(lines)


def explanation_html(step: Explanation, text: TokenText = str) -> str:
    """A self-contained page with the tree as SVG: depth to the right, best sibling on top."""
    rows = _rows(step.nodes)
    depth = max((node.depth for node in step.nodes), default=0)
    width, height = (depth + 1) * _COLUMN + 20, (max(rows) + 1) * _ROW + 20
    edges, boxes = [], [_box(0, rows[0], text(step.root_token), "accepted", "the last token")]
    for j, node in enumerate(step.nodes):
        kind = "accepted" if node.accepted else "" if j < step.num_verified else "unverified"
        parent_depth = node.depth - 1
        edges.append(
            f'<line class="{kind}" x1="{10 + parent_depth * _COLUMN + _BOX}" '
            f'y1="{_middle(rows[node.parent])}" x2="{10 + node.depth * _COLUMN}" '
            f'y2="{_middle(rows[j + 1])}"/>'
        )
        label = f"{text(node.token)} {node.rho:.3f}"
        hint = f"node {j + 1}, depth {node.depth}, rho {node.rho:.6f}, token id {node.token}"
        boxes.append(_box(node.depth, rows[j + 1], label, kind, hint))
    body = "\n".join([*edges, *boxes])
    summary = html.escape(explanation_text(step, text))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(step.title)}</title><style>{_STYLE}</style></head><body>\n"
        f"<h1>{html.escape(step.title)}</h1>\n"
        f"<p>{len(step.nodes)} nodes, {step.num_verified} verified (solid), "
        f"{len(step.accepted)} accepted (green); each shows its token and path score rho.</p>\n"
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}">\n'
        f"{body}\n</svg>\n<pre>{summary}</pre>\n</body></html>\n"
    )


def _powers(last: int) -> list[int]:
    return [1 << k for k in range(1, last.bit_length()) if 1 << k <= last]


def _rows(nodes: list[Node]) -> list[int]:
    """Row of every node number: a child above its siblings shares its parent's row."""
    children: dict[int, list[int]] = {}
    for j, node in enumerate(nodes):
        children.setdefault(node.parent, []).append(j + 1)
    rows, free, stack = [0] * (len(nodes) + 1), 0, [(0, True)]
    while stack:
        number, first = stack.pop()
        if not first:
            free += 1
        rows[number] = free
        below = children.get(number, [])
        stack += [(child, k == 0) for k, child in reversed(list(enumerate(below)))]
    return rows


def _middle(row: int) -> int:
    return 10 + row * _ROW + (_ROW - 4) // 2


def _box(depth: int, row: int, label: str, kind: str, hint: str) -> str:
    x, y = 10 + depth * _COLUMN, 10 + row * _ROW
    shown = label if len(label) <= 15 else label[:6] + ".." + label[-7:]
    return (
        f'<g class="{kind}"><title>{html.escape(hint)}</title>'
        f'<rect x="{x}" y="{y}" width="{_BOX}" height="{_ROW - 4}" rx="4"/>'
        f'<text x="{x + 5}" y="{y + 14}">{html.escape(shown)}</text></g>'
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print one step's decision, and draw it as a page and a figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recording", type=Path)
    parser.add_argument("--step", type=int, default=0, help="index of the step (default 0)")
    parser.add_argument("--profile", type=Path, help="default: the newest in the cache")
    parser.add_argument("--nodes", type=int, default=63, help="N_max (default 63)")
    parser.add_argument("--tokenizer", help="model whose tokenizer turns ids into text")
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for PNG and page")
    arguments = parser.parse_args(argv)
    try:
        profile = read_profile(arguments.profile or newest_profile())
        recording = load_recording(arguments.recording)
        latency = TableLatency(profile.table)
        step = explain_step(recording, arguments.step, latency, arguments.nodes)
    except (OSError, ValueError) as error:
        print(f"explain: {error}", file=sys.stderr)
        return 1
    text = _token_text(arguments.tokenizer)
    print(explanation_text(step, text))
    arguments.out.mkdir(parents=True, exist_ok=True)
    page = arguments.out / f"step-{arguments.step}.html"
    page.write_text(explanation_html(step, text), encoding="utf-8")
    figure = arguments.out / f"step-{arguments.step}.png"
    step_figure(step.order, step.cost_ms, 1, figure)
    print(f"\ndrawn: {page}, {figure}")
    return 0


def _token_text(tokenizer: str | None) -> Callable[[int], str]:
    """Turn token ids into text, or into their numbers without a tokenizer."""
    if tokenizer is None:
        return str
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(tokenizer)
    return lambda token: str(loaded.decode([token]))


if __name__ == "__main__":
    raise SystemExit(main())
