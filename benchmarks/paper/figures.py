# SPDX-License-Identifier: Apache-2.0
"""The paper's figures, from one machine's responses."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.figures import Sweep, new_figure, save_figure, sweep_figure, tradeoff_figure
from benchmarks.paper.machines import Machine
from benchmarks.paper.methods import ADAPTIVE, CHAINS, PLAIN, REFERENCE, chain_name, fixed_name
from benchmarks.paper.stats import Cell, speedup

Cells = dict[str, dict[str, Cell]]


def draw(machine: Machine, out: Path, stem: str) -> None:
    """Draw what the machine has data for; without matplotlib, nothing."""
    try:
        panels = {}
        for temperature, concurrency in machine.situations():
            cells = machine.cells(temperature, concurrency)
            if PLAIN not in cells:
                continue
            title = f"T={temperature:g}, concurrency {concurrency}"
            name = f"{stem}-t{temperature:g}-c{concurrency}"
            bars(cells, title, out / f"{name}-sets.png")
            budgets = budgets_of(cells)
            if len(budgets) > 1:
                panels[title] = sweep(cells, budgets)
                tradeoff(cells, budgets, title, out / f"{name}-tradeoff.png")
        if panels:
            sweep_figure(panels, out / f"{stem}-sweep.png")
        costs([*machine.responses.values()], out / f"{stem}-costs.png")
        scores(machine.scores, out / f"{stem}-scores.png")
    except RuntimeError as error:
        print(error)


def budgets_of(cells: Cells) -> list[int]:
    """Fixed budgets that ran on all of plain decoding's sets."""
    sets = set(cells[PLAIN])
    before = fixed_name(0)[:-1]
    numbers = [int(name.removeprefix(before)) for name in cells if name.startswith(before)]
    return sorted(n for n in numbers if set(cells[fixed_name(n)]) == sets)


def _mean(cells: Cells, name: str) -> float:
    return speedup([(cells[PLAIN][s], cells[name][s]) for s in cells[PLAIN]]).mean


def sweep(cells: Cells, budgets: list[int]) -> Sweep:
    """Speed-ups of fixed budgets, of the best one of each set, and of the adaptive engine."""
    sets = cells[PLAIN]
    by_set = {
        s: {n: speedup([(sets[s], cells[fixed_name(n)][s])]).mean for n in budgets} for s in sets
    }
    panel = Sweep(
        budgets,
        [_mean(cells, fixed_name(n)) for n in budgets],
        fmean(max(own.values()) for own in by_set.values()),
    )
    if set(cells.get(ADAPTIVE, {})) == set(sets):
        nodes = fmean(cell.numbers()["nodes"] for cell in cells[ADAPTIVE].values())
        panel.adaptive = nodes, _mean(cells, ADAPTIVE)
    chains = [name for n in CHAINS if set(cells.get(name := chain_name(n), {})) == set(sets)]
    if chains:
        best = max(chains, key=lambda name: _mean(cells, name))
        panel.chain = best, _mean(cells, best)
    return panel


def tradeoff(cells: Cells, budgets: list[int], title: str, path: Path) -> None:
    """Acceptance against latency."""
    numbers = {s: [cells[fixed_name(n)][s].numbers() for n in budgets] for s in cells[PLAIN]}
    taus = {s: [row["tau"] for row in rows] for s, rows in numbers.items()}
    step_ms = {
        part: [fmean(row[f"{part}_ms"] for row in rows) for rows in zip(*numbers.values())]
        for part in ("draft", "aux", "verify")
    }
    tradeoff_figure(budgets, taus, step_ms, title, path)


def bars(cells: Cells, title: str, path: Path) -> None:
    """Speed-ups by set, one bar per method, with their intervals."""
    sets = list(cells[PLAIN])
    names = [name for name in cells if name not in (PLAIN, REFERENCE)]
    if not names:
        return
    figure, axis = new_figure(1, 1, width=max(6.0, 1.4 * len(sets) + 3), height=4.0)
    x, width = np.arange(len(sets)), 0.8 / len(names)
    for number, name in enumerate(names):
        found = [
            speedup([(cells[PLAIN][s], cells[name][s])]) if s in cells[name] else None for s in sets
        ]
        mean = np.array([np.nan if r is None else r.mean for r in found])
        low = np.array([np.nan if r is None else r.low for r in found])
        high = np.array([np.nan if r is None else r.high for r in found])
        spread = np.clip([mean - low, high - mean], 0.0, None)
        at = x + (number - (len(names) - 1) / 2) * width
        axis.bar(at, mean, width, yerr=spread, label=name, error_kw={"linewidth": 0.6})
    axis.axhline(1.0, color="gray", linewidth=0.8)
    axis.set_xticks(x, sets, rotation=30, ha="right")
    axis.set(ylabel="speed-up over plain", title=title)
    axis.legend(fontsize=6, ncols=2)
    save_figure(figure, path)


def costs(rows: list[dict[str, Any]], path: Path) -> None:
    """Predicted and measured C(N) of adaptive steps by context length, a point per response."""
    timed = [row for row in rows if row["timed_steps"] and row["concurrency"] == 1]
    if not timed:
        return
    figure, (left, right) = new_figure(1, 2, width=9.0, height=3.8)
    context = [row["prompt_len"] + row["tokens"] / 2 for row in timed]
    measured = [row["measured_ms"] / row["timed_steps"] for row in timed]
    predicted = [row["predicted_ms"] / row["timed_steps"] for row in timed]
    left.plot(context, measured, ".", label="measured")
    left.plot(context, predicted, "x", label="predicted")
    left.set(xlabel="context, tokens", ylabel="C(N), ms")
    left.legend()
    right.plot(measured, predicted, ".")
    most = max(*measured, *predicted)
    right.plot([0, most], [0, most], color="gray", linewidth=0.8)
    right.set(xlabel="measured C(N), ms", ylabel="predicted C(N), ms")
    save_figure(figure, path)


def scores(rows: list[dict[str, Any]], path: Path) -> None:
    """Expected against accepted draft tokens."""
    if not rows:
        return
    figure, axis = new_figure(1, 1, width=4.8, height=4.0)
    for row in rows:
        label = f"T={row['temperature']:g}, r={row['pearson']:.2f}, {row['steps']} steps"
        axis.plot(row["expected"], row["accepted"], marker="o", label=label)
    most = max(max(row["expected"] + row["accepted"]) for row in rows)
    axis.plot([0, most], [0, most], color="gray", linewidth=0.8)
    axis.set(xlabel="expected: sum of path scores", ylabel="accepted draft tokens")
    axis.legend(fontsize=8)
    save_figure(figure, path)
