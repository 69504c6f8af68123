# SPDX-License-Identifier: Apache-2.0
"""The paper's two figures in measured seconds: the trade-off and the budget sweep."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import numpy as np

from benchmarks.replay.plots import new_figure, save_figure
from benchmarks.speed.methods import ADAPTIVE, BUDGETS, fixed_name
from benchmarks.speed.report import Cell, best_chain, mean_speedup

Domains = dict[str, dict[str, Cell]]


def budgets_of(domains: Domains) -> list[int]:
    """Fixed budgets that ran on every domain."""
    return [n for n in BUDGETS if all(fixed_name(n) in cells for cells in domains.values())]


def tradeoff_figure(domains: Domains, title: str, path: Path) -> None:
    """Left: tau over the budget, per domain. Right: what a step of that budget takes."""
    figure, (left, right) = new_figure(1, 2, width=10.0, height=4.0)
    budgets = budgets_of(domains)
    numbers = {d: [cells[fixed_name(n)].numbers() for n in budgets] for d, cells in domains.items()}
    for domain, rows in numbers.items():
        left.plot(budgets, [row["tau"] for row in rows], marker="o", label=domain)
    left.set(xscale="log", xlabel="verified nodes N", ylabel="tokens per target forward")
    left.set_xticks(budgets, [str(n) for n in budgets])
    left.minorticks_off()
    left.legend()
    place, bottom = np.arange(len(budgets)), np.zeros(len(budgets))
    for part in ("draft", "aux", "verify"):
        height = np.array(
            [fmean(rows[i][f"{part}_ms"] for rows in numbers.values()) for i in place]
        )
        right.bar(place, height, bottom=bottom, label=f"T_{part}")
        bottom = bottom + height
    right.set_xticks(place, [str(n) for n in budgets])
    right.set(xlabel="verified nodes N", ylabel="ms per step", title=title)
    right.legend()
    save_figure(figure, path)


def sweep_figure(panels: dict[str, Domains], path: Path) -> None:
    """Speed-up of fixed budgets, the adaptive engine and the oracle; one panel per title."""
    figure, axes = new_figure(1, len(panels), width=4.5 * len(panels), height=3.8)
    for axis, (title, domains) in zip(np.atleast_1d(axes), panels.items(), strict=True):
        budgets = budgets_of(domains)
        speedups = [mean_speedup(domains, fixed_name(n)) for n in budgets]
        axis.plot(budgets, speedups, marker="o", color="tab:blue", label="fixed N")
        if all(ADAPTIVE in cells for cells in domains.values()):
            nodes = fmean(cells[ADAPTIVE].numbers()["nodes"] for cells in domains.values())
            star = {"marker": "*", "markersize": 16, "linestyle": "none", "color": "tab:green"}
            at = max(nodes, 1.0), mean_speedup(domains, ADAPTIVE)
            axis.plot([at[0]], [at[1]], label="adaptive (at its mean N)", **star)
        oracle = fmean(
            max(cells[fixed_name(n)].speedup for n in budgets) for cells in domains.values()
        )
        axis.axhline(oracle, linestyle="--", color="goldenrod", label="oracle per domain")
        chain = best_chain(domains)
        if chain is not None:
            axis.axhline(mean_speedup(domains, chain), linestyle=":", color="gray", label=chain)
        axis.set(xscale="log", xlabel="verified nodes N", ylabel="speed-up over plain", title=title)
        axis.set_xticks(budgets, [str(n) for n in budgets])
        axis.minorticks_off()
        axis.legend(fontsize=8)
    save_figure(figure, path)
