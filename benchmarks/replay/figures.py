# SPDX-License-Identifier: Apache-2.0
"""The paper's two figures from a replay: the acceptance-latency trade-off and the budget sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.replay.costs import CostSource
from benchmarks.replay.plots import new_figure, save_figure
from benchmarks.replay.simulation import Corpus
from benchmarks.replay.studies import BUDGETS


def tradeoff_figure(corpus: Corpus, source: CostSource, study: dict[str, Any], path: Path) -> None:
    """Left: tau over the budget, per domain. Right: what a step of that budget costs."""
    figure, (left, right) = new_figure(1, 2, width=10.0, height=4.0)
    budgets = [n for n in BUDGETS if n <= corpus.max_nodes]
    for domain in study["domains"]:
        taus = [study["rows"][f"fixed {n}"][domain]["tau"] for n in budgets]
        left.plot(budgets, taus, marker="o", label=domain)
    left.set(xscale="log", xlabel="verified nodes N", ylabel="tokens per target forward")
    left.set_xticks(budgets, [str(n) for n in budgets])
    left.minorticks_off()
    left.legend()
    table = source.table
    context = float(np.mean(corpus.recording.context_lens))
    forward = [float(table.forward_ms(1, context)[min(n + 1, table.max_rows)]) for n in budgets]
    place = np.arange(len(budgets))
    bottom = np.zeros(len(budgets))
    parts = {
        "draft": np.full(len(budgets), table.drafter_ms(1)),
        "aux": np.full(len(budgets), table.aux_ms),
        "verify": np.array(forward),
    }
    for label, height in parts.items():
        right.bar(place, height, bottom=bottom, label=label)
        bottom = bottom + height
    right.set_xticks(place, [str(n) for n in budgets])
    right.set(xlabel="verified nodes N", ylabel="ms per step", title=source.name)
    right.legend()
    save_figure(figure, path)


def sweep_figure(studies: dict[str, dict[str, Any]], path: Path) -> None:
    """Speed-up of fixed budgets, the adaptive point and the oracle, one panel per cost table."""
    figure, axes = new_figure(1, len(studies), width=4.5 * len(studies), height=3.8)
    panels = [axes] if len(studies) == 1 else list(axes)
    for axis, (name, study) in zip(panels, studies.items(), strict=True):
        rows = study["rows"]
        budgets = [n for n in BUDGETS if f"fixed {n}" in rows]
        speedups = [rows[f"fixed {n}"]["average"]["speedup"] for n in budgets]
        axis.plot(budgets, speedups, marker="o", color="tab:blue", label="fixed N")
        adaptive = rows["adaptive"]["average"]
        axis.plot(
            [max(adaptive["nodes"], 1.0)],
            [adaptive["speedup"]],
            marker="*",
            markersize=16,
            linestyle="none",
            color="tab:green",
            label="adaptive (at its mean N)",
        )
        axis.axhline(
            rows["oracle per domain"]["average"]["speedup"],
            linestyle="--",
            color="goldenrod",
            label="oracle per domain",
        )
        axis.axhline(
            rows["chain"]["average"]["speedup"], linestyle=":", color="gray", label="chain"
        )
        axis.set(xscale="log", xlabel="verified nodes N", ylabel="speed-up over plain", title=name)
        axis.set_xticks(budgets, [str(n) for n in budgets])
        axis.minorticks_off()
        axis.legend(fontsize=8)
    save_figure(figure, path)
