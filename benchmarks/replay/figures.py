# SPDX-License-Identifier: Apache-2.0
"""Figures of a replay: the paper's two, and the decision of one step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.figures import Sweep, new_figure, save_figure
from benchmarks.figures import sweep_figure as draw_sweep
from benchmarks.figures import tradeoff_figure as draw_tradeoff
from benchmarks.replay.controller import ScoreOrder, best_size, speedup_curve
from benchmarks.replay.costs import CostSource
from benchmarks.replay.simulation import Corpus
from benchmarks.replay.studies import BUDGETS
from vllm_bastion.policy.cost.table import CostArray


def tradeoff_figure(corpus: Corpus, source: CostSource, study: dict[str, Any], path: Path) -> None:
    """tau, and the cost of a step, over the budget."""
    budgets = [n for n in BUDGETS if n <= corpus.max_nodes]
    taus = {
        domain: [study["rows"][f"fixed {n}"][domain]["tau"] for n in budgets]
        for domain in study["domains"]
    }
    table = source.table
    forward = table.forward_ms(1, float(np.mean(corpus.recording.context_lens)))
    step_ms = {
        "draft": [table.drafter_ms(1)] * len(budgets),
        "aux": [table.aux_ms] * len(budgets),
        "verify": [float(forward[min(n + 1, table.max_rows)]) for n in budgets],
    }
    draw_tradeoff(budgets, taus, step_ms, source.name, path)


def sweep_figure(studies: dict[str, dict[str, Any]], path: Path) -> None:
    """Speed-ups over the budget, one panel per cost table."""
    panels = {}
    for name, study in studies.items():
        average = {policy: row["average"] for policy, row in study["rows"].items()}
        speed = {policy: row["speedup"] for policy, row in average.items()}
        budgets = [n for n in BUDGETS if f"fixed {n}" in speed]
        panels[name] = Sweep(
            budgets,
            [speed[f"fixed {n}"] for n in budgets],
            speed["oracle per domain"],
            (average["adaptive"]["nodes"], speed["adaptive"]),
            ("chain", speed["chain"]),
        )
    draw_sweep(panels, path)


def step_figure(order: ScoreOrder, cost_ms: CostArray, base_rows: int, path: Path) -> None:
    """S(N), A-hat(N) and C(N) of one step, with the chosen N*."""
    curve = speedup_curve(order, cost_ms, base_rows)
    nodes = np.arange(len(curve))
    chosen = best_size(curve)
    panels: dict[str, NDArray[Any]] = {
        "S(N), tokens per ms": curve,
        "A-hat(N), tokens": order.expected[: len(curve)],
        "C(N), ms": cost_ms[base_rows : base_rows + len(curve)],
    }
    figure, axes = new_figure(1, 3, width=12.0, height=3.6)
    for axis, (label, values) in zip(axes, panels.items(), strict=True):
        axis.plot(nodes, values)
        axis.plot([chosen], [values[chosen]], "o", color="tab:red", label=f"N* = {chosen}")
        axis.set(xlabel="draft nodes N", title=label)
        axis.legend()
    save_figure(figure, path)
