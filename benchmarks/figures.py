# SPDX-License-Identifier: Apache-2.0
"""The paper's two figures: the acceptance-latency trade-off and the budget sweep.

`benchmarks.replay` draws them from computed times, `benchmarks.paper` from measured ones. Only
drawing a figure imports matplotlib.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


def new_figure(rows: int, columns: int, *, width: float, height: float) -> tuple[Any, Any]:
    """A figure and its axes, without a display.

    Raises:
        RuntimeError: matplotlib is not installed; the text names the extra that has it.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError("drawing needs matplotlib: pip install 'vllm-bastion[bench]'") from error
    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns)


def save_figure(figure: Any, path: Path) -> None:
    """Write a PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def tradeoff_figure(
    budgets: Sequence[int],
    taus: Mapping[str, Sequence[float]],
    step_ms: Mapping[str, Sequence[float]],
    title: str,
    path: Path,
) -> None:
    """Left: tau over the budget. Right: the time of a step of that budget.

    Args:
        budgets: verified nodes, the x axis.
        taus: per domain, a tau for each budget.
        step_ms: per part of a step ("draft", "aux", "verify"), ms for each budget.
    """
    figure, (left, right) = new_figure(1, 2, width=10.0, height=4.0)
    for domain, values in taus.items():
        left.plot(budgets, values, marker="o", label=domain)
    left.set(ylabel="tokens per target forward")
    _budget_axis(left, budgets)
    left.legend()
    x, bottom = np.arange(len(budgets)), np.zeros(len(budgets))
    for part, height in step_ms.items():
        right.bar(x, height, bottom=bottom, label=f"T_{part}")
        bottom = bottom + np.asarray(height)
    right.set_xticks(x, [str(n) for n in budgets])
    right.set(xlabel="verified nodes N", ylabel="ms per step", title=title)
    right.set_ylim(0.0, 1.15 * float(bottom.max()))
    right.legend(ncols=len(step_ms), loc="upper center")
    save_figure(figure, path)


@dataclass
class Sweep:
    """A panel of `sweep_figure`: speed-ups over plain decoding."""

    budgets: Sequence[int]
    speedups: Sequence[float]
    oracle: float
    # (mean nodes, speed-up)
    adaptive: tuple[float, float] | None = None
    # (name, speed-up)
    chain: tuple[str, float] | None = None


def sweep_figure(panels: Mapping[str, Sweep], path: Path) -> None:
    """Speed-up of fixed budgets, the adaptive engine, the oracle and the chain, by panel title."""
    figure, axes = new_figure(1, len(panels), width=4.5 * len(panels), height=3.8)
    for axis, (title, sweep) in zip(np.atleast_1d(axes), panels.items(), strict=True):
        axis.plot(sweep.budgets, sweep.speedups, marker="o", color="tab:blue", label="fixed N")
        if sweep.adaptive is not None:
            nodes, speedup = sweep.adaptive
            star = {"marker": "*", "markersize": 16, "linestyle": "none", "color": "tab:green"}
            axis.plot([max(nodes, 1.0)], [speedup], label="adaptive (at its mean N)", **star)
        axis.axhline(sweep.oracle, linestyle="--", color="goldenrod", label="oracle per domain")
        if sweep.chain is not None:
            name, speedup = sweep.chain
            axis.axhline(speedup, linestyle=":", color="gray", label=name)
        axis.set(ylabel="speed-up over plain", title=title)
        _budget_axis(axis, sweep.budgets)
        axis.legend(fontsize=8)
    save_figure(figure, path)


def _budget_axis(axis: Any, budgets: Sequence[int]) -> None:
    axis.set(xscale="log", xlabel="verified nodes N")
    axis.set_xticks(budgets, [str(n) for n in budgets])
    axis.minorticks_off()
