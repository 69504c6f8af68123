# SPDX-License-Identifier: Apache-2.0
"""The paper's two figures, from one machine's responses; needs matplotlib.

The trade-off: tau, and the time of a step, over the number of verified nodes. The sweep: the
speed-up of fixed budgets, of the adaptive one, and of the best chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.paper.machines import Cells, Machine
from benchmarks.paper.methods import ADAPTIVE, ALL_CHAINS, PLAIN, V2, chain_name, fixed_name
from benchmarks.paper.stats import speedup


def draw(machine: Machine, out: Path, stem: str) -> None:
    """Draw what the machine has data for; without matplotlib, nothing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        print("drawing needs matplotlib: pip install 'vllm-bastion[bench]'")
        return
    for temperature, concurrency in machine.situations():
        cells = machine.cells(temperature, concurrency)
        budgets = budgets_of(cells) if PLAIN in cells else []
        if len(budgets) < 2:
            continue
        figure = Figure(figsize=(14.0, 4.0), dpi=120, layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle(f"{machine.name}, T={temperature:g}, {concurrency} at a time")
        left, middle, right = figure.subplots(1, 3)
        tradeoff(left, middle, cells, budgets)
        sweep(right, cells, budgets)
        figure.savefig(out / f"{stem}-t{temperature:g}-c{concurrency}.png", format="png")


def budgets_of(cells: Cells) -> list[int]:
    """Fixed budgets that ran on all of plain decoding's sets."""
    sets = set(cells[PLAIN])
    before = fixed_name(0)[:-1]
    numbers = [int(name.removeprefix(before)) for name in cells if name.startswith(before)]
    return sorted(n for n in numbers if set(cells[fixed_name(n)]) == sets)


def tradeoff(left: Any, right: Any, cells: Cells, budgets: Sequence[int]) -> None:
    """Acceptance against latency: tau of each set, and the parts of a step."""
    numbers = {s: [cells[fixed_name(n)][s].numbers() for n in budgets] for s in cells[PLAIN]}
    for name, rows in numbers.items():
        left.plot(budgets, [row["tau"] for row in rows], marker="o", label=name)
    left.set(ylabel="tokens per target forward")
    _budget_axis(left, budgets)
    left.legend(fontsize=8)
    x, bottom = np.arange(len(budgets)), np.zeros(len(budgets))
    for part in ("draft", "aux", "verify"):
        height = [fmean(row[f"{part}_ms"] for row in rows) for rows in zip(*numbers.values())]
        right.bar(x, height, bottom=bottom, label=f"T_{part}")
        bottom = bottom + np.asarray(height)
    right.set_xticks(x, [str(n) for n in budgets])
    right.set(xlabel="verified nodes N", ylabel="ms per step")
    right.legend(fontsize=8)


def sweep(axis: Any, cells: Cells, budgets: Sequence[int]) -> None:
    """Speed-ups of fixed budgets, of the best one of each set, the adaptive one and the chain."""
    sets = cells[PLAIN]

    def mean(name: str) -> float:
        return speedup([(sets[s], cells[name][s]) for s in sets]).mean

    axis.plot(budgets, [mean(fixed_name(n)) for n in budgets], marker="o", label="fixed N")
    best = [max(speedup([(sets[s], cells[fixed_name(n)][s])]).mean for n in budgets) for s in sets]
    axis.axhline(fmean(best), linestyle="--", color="goldenrod", label="best N of each set")
    if set(cells.get(ADAPTIVE, {})) == set(sets):
        nodes = fmean(cell.numbers()["nodes"] for cell in cells[ADAPTIVE].values())
        star = {"marker": "*", "markersize": 16, "linestyle": "none", "color": "tab:green"}
        axis.plot([max(nodes, 1.0)], [mean(ADAPTIVE)], label="adaptive (at its mean N)", **star)
    names = [chain_name(n) + runner for n in ALL_CHAINS for runner in ("", V2)]
    chains = {name: mean(name) for name in names if set(cells.get(name, {})) == set(sets)}
    if chains:
        name = max(chains, key=lambda name: chains[name])
        axis.axhline(chains[name], linestyle=":", color="gray", label=name)
    axis.set(ylabel="speed-up over plain")
    _budget_axis(axis, budgets)
    axis.legend(fontsize=8)


def _budget_axis(axis: Any, budgets: Sequence[int]) -> None:
    axis.set(xscale="log", xlabel="verified nodes N")
    axis.set_xticks(budgets, [str(n) for n in budgets])
    axis.minorticks_off()
