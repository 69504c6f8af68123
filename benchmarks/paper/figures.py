# SPDX-License-Identifier: Apache-2.0
"""The paper's figures, from one machine's responses."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.figures import Sweep, new_figure, save_figure, sweep_figure, tradeoff_figure
from benchmarks.paper.machines import Cells, Machine
from benchmarks.paper.methods import (
    ADAPTIVE,
    ALL_CHAINS,
    PLAIN,
    REFERENCE,
    V2,
    chain_name,
    fixed_name,
)
from benchmarks.paper.stats import Ratio, speedup


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
    names = [chain_name(n) + runner for n in ALL_CHAINS for runner in ("", V2)]
    chains = [name for name in names if set(cells.get(name, {})) == set(sets)]
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
    """Speed-ups by set and their mean, one bar per method, with their intervals."""
    sets = list(cells[PLAIN])
    names = [name for name in cells if name not in (PLAIN, REFERENCE)]
    if not names:
        return
    own = {
        name: [
            *(ratio_of(cells, name, [s]) if s in cells[name] else None for s in sets),
            ratio_of(cells, name, sets) if set(cells[name]) == set(sets) else None,
        ]
        for name in names
    }
    width = max(7.0, 0.13 * len(names) * (len(sets) + 1) + 3.5)
    figure, axis = new_figure(1, 1, width=width, height=4.2)
    x, step = np.arange(len(sets) + 1), 0.85 / len(names)
    for number, (name, color) in enumerate(zip(names, _colors(names), strict=True)):
        mean = np.array([np.nan if r is None else r.mean for r in own[name]])
        low = np.array([np.nan if r is None else r.low for r in own[name]])
        high = np.array([np.nan if r is None else r.high for r in own[name]])
        spread = np.clip([mean - low, high - mean], 0.0, None)
        at = x + (number - (len(names) - 1) / 2) * step
        line = {"linewidth": 0.7, "ecolor": "0.25"}
        axis.bar(at, mean, 0.92 * step, yerr=spread, label=name, color=color, error_kw=line)
    axis.axhline(1.0, color="black", linewidth=0.8)
    axis.set_xticks(x, [*sets, "mean"])
    axis.set(ylabel="speed-up over plain", title=title)
    # A code prompt's interval may be several times as high as any mean.
    top = max(r.mean for ratios in own.values() for r in ratios if r is not None)
    axis.set_ylim(0.0, 1.35 * max(1.0, top))
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    save_figure(figure, path)


def ratio_of(cells: Cells, name: str, sets: list[str]) -> Ratio:
    """A method's speed-up over plain decoding on some sets."""
    return speedup([(cells[PLAIN][s], cells[name][s]) for s in sets])


def _colors(names: list[str]) -> list[Any]:
    """vLLM's own methods in grays and blues, this plugin's from yellow to red."""
    from matplotlib import colormaps

    ours = [name for name in names if name.startswith("bastion")]
    theirs = [name for name in names if name not in ours]
    found = {}
    for group, scale in ((theirs, "PuBu"), (ours, "YlOrRd")):
        shades = np.linspace(0.3, 0.95, max(2, len(group)))
        found |= {name: colormaps[scale](shade) for name, shade in zip(group, shades, strict=False)}
    return [found[name] for name in names]


def costs(rows: list[dict[str, Any]], path: Path) -> None:
    """Predicted and measured C(N) of adaptive steps by context length, a point per response."""
    timed = [row for row in rows if row["timed_steps"] and row["concurrency"] == 1]
    if not timed:
        return
    figure, (left, right) = new_figure(1, 2, width=10.0, height=4.0)
    context = np.array([row["prompt_len"] + row["tokens"] / 2 for row in timed])
    measured = np.array([row["measured_ms"] / row["timed_steps"] for row in timed])
    predicted = np.array([row["predicted_ms"] / row["timed_steps"] for row in timed])
    far = context.max() > 4 * context.min()
    dots = left.scatter(measured, predicted, 14, context, norm="log" if far else "linear")
    most = 1.05 * max(*measured, *predicted)
    left.plot([0, most], [0, most], color="gray", linewidth=0.8)
    left.set(xlabel="measured C(N), ms", ylabel="predicted C(N), ms")
    figure.colorbar(dots, label="context, tokens")
    right.plot(context, predicted / measured, ".")
    right.axhline(1.0, color="gray", linewidth=0.8)
    right.set(xlabel="context, tokens", ylabel="predicted over measured C(N)")
    right.set_ylim(bottom=0.0)
    if far:
        right.set_xscale("log")
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
