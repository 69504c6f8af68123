# SPDX-License-Identifier: Apache-2.0
"""Figures of `vllm-bastion show` and `explain`, and the helpers that the replay draws with.

matplotlib is imported when a figure is drawn, never by the engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.replay.controller import ScoreOrder, best_size, speedup_curve
from vllm_bastion.policy.cost.store import Profile
from vllm_bastion.policy.cost.table import CostArray


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


def profile_figure(profile: Profile, path: Path) -> None:
    """Latency over rows per context: dots measured, solid calibrated, dashed bare roofline.

    The grey steps are what a step costs after padding to the captured sizes, which the vertical
    ticks on the axis mark.
    """
    table = profile.table
    figure, axis = new_figure(1, 1, width=7.5, height=5.0)
    groups: dict[tuple[float, int], list[tuple[int, float]]] = {}
    for rows, context, ms, num_reqs in table.samples:
        groups.setdefault((context, num_reqs), []).append((rows, ms))
    top = max(table.max_rows, *(rows for rows, *_ in table.samples))
    curve_rows = np.unique(np.geomspace(1, top, 200).round())
    for index, ((context, num_reqs), points) in enumerate(sorted(groups.items())):
        color = f"C{index % 10}"
        label = f"c = {context:g}" + (f", R = {num_reqs}" if num_reqs > 1 else "")
        x, y = np.array(sorted(points)).T
        axis.plot(x, y, "o", color=color, markersize=4, label=label)
        if profile.calibrated is not None:
            fitted = profile.calibrated.predict_ms(curve_rows, context, num_reqs)
            bare = profile.calibrated.roofline.predict_ms(curve_rows, context, num_reqs)
            axis.plot(curve_rows, fitted, "-", color=color, linewidth=1.2)
            axis.plot(curve_rows, bare, "--", color=color, linewidth=1.0)
    context = float(np.median([context for _, context, *_ in table.samples]))
    steps = table.forward_ms(1, context)
    axis.step(
        np.arange(len(steps))[1:],
        steps[1:],
        where="mid",
        color="gray",
        alpha=0.6,
        label="what a step costs",
    )
    for size in table.captured_sizes:
        axis.axvline(size, ymax=0.03, color="black", linewidth=1.0)
    axis.set(
        xscale="log",
        xlabel="target rows",
        ylabel="forward pass, ms",
        title=f"{profile.key.device}: dots measured, solid calibrated, dashed roofline",
    )
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=8)
    save_figure(figure, path)


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
