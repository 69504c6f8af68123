# SPDX-License-Identifier: Apache-2.0
"""The paper's two figures in measured seconds."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from benchmarks.figures import Sweep
from benchmarks.figures import sweep_figure as draw_sweep
from benchmarks.figures import tradeoff_figure as draw_tradeoff
from benchmarks.speed.methods import ADAPTIVE, BUDGETS, fixed_name
from benchmarks.speed.report import Cell, best_chain, mean_speedup

Domains = dict[str, dict[str, Cell]]


def budgets_of(domains: Domains) -> list[int]:
    """Fixed budgets that ran on every domain."""
    return [n for n in BUDGETS if all(fixed_name(n) in cells for cells in domains.values())]


def tradeoff_figure(domains: Domains, title: str, path: Path) -> None:
    """tau, and the time of a step, over the budget."""
    budgets = budgets_of(domains)
    numbers = {d: [cells[fixed_name(n)].numbers() for n in budgets] for d, cells in domains.items()}
    taus = {domain: [row["tau"] for row in rows] for domain, rows in numbers.items()}
    step_ms = {
        part: [fmean(row[f"{part}_ms"] for row in rows) for rows in zip(*numbers.values())]
        for part in ("draft", "aux", "verify")
    }
    draw_tradeoff(budgets, taus, step_ms, title, path)


def sweep_figure(panels: dict[str, Domains], path: Path) -> None:
    """Speed-ups over the budget, one panel per title."""
    draw_sweep({title: _sweep(domains) for title, domains in panels.items()}, path)


def _sweep(domains: Domains) -> Sweep:
    budgets, chain = budgets_of(domains), best_chain(domains)
    sweep = Sweep(
        budgets,
        [mean_speedup(domains, fixed_name(n)) for n in budgets],
        fmean(max(cells[fixed_name(n)].speedup for n in budgets) for cells in domains.values()),
    )
    if all(ADAPTIVE in cells for cells in domains.values()):
        nodes = fmean(cells[ADAPTIVE].numbers()["nodes"] for cells in domains.values())
        sweep.adaptive = nodes, mean_speedup(domains, ADAPTIVE)
    if chain is not None:
        sweep.chain = chain, mean_speedup(domains, chain)
    return sweep
