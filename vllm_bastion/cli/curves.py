# SPDX-License-Identifier: Apache-2.0
"""C(N) and the gate's break-even of a profile, as text for a terminal or as a PNG.

Both follow from the measured table alone, without the corrections that a running engine adds. With
R requests and N nodes each, a step has R (1 + N) rows and costs C. A plain step costs C_plain. A
tree pays if each request is expected to have at least

    a(N) = C / C_plain - 1

draft tokens accepted, because a plain step would have emitted one token in the time C_plain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_bastion.policy.cost.table import StepCostTable

_MARKS = "●○▲△■□"
_WIDTH, _HEIGHT = 64, 12
_MOST_CURVES, _MOST_NODES = 3, 255


@dataclass(frozen=True)
class Curve:
    """One batch size.

    Attributes:
        reqs: requests of the batch, R.
        nodes: nodes of each request, ascending; 0 is a step that drafts and verifies nothing.
        cost_ms: milliseconds of such a step.
        break_even: accepted draft tokens that each request needs for the step to pay.
        plain_ms: milliseconds of a plain step.
    """

    reqs: int
    nodes: tuple[int, ...]
    cost_ms: tuple[float, ...]
    break_even: tuple[float, ...]
    plain_ms: float


@dataclass(frozen=True)
class Curves:
    """The curves of a profile at one context length (cached tokens per request)."""

    context: float
    curves: tuple[Curve, ...]


def curves(table: StepCostTable, context: float | None = None) -> Curves:
    """The curves of the batch sizes that were measured, at most three, up to 255 nodes.

    Args:
        table: of a profile.
        context: cached tokens per request; None: the shortest context that was measured, or 0.

    Raises:
        ValueError: `context` is negative or not finite.
    """
    check_context(context)
    if context is None:
        context = min((sample[1] for sample in table.samples if sample[1] > 0), default=0.0)
    largest = min(table.max_rows, max(sample[0] for sample in table.samples))
    # Batch sizes whose steps with one node per request are within the measured rows.
    sizes = sorted({sample[3] for sample in table.samples if 2 * sample[3] <= largest} | {1})
    return Curves(
        context, tuple(_curve(table, reqs, context, largest) for reqs in sizes[:_MOST_CURVES])
    )


def check_context(context: float | None) -> None:
    """Refuse a number of cached tokens that is negative or not finite.

    Raises:
        ValueError: naming the option.
    """
    if context is not None and not (math.isfinite(context) and context >= 0):
        raise ValueError(f"--context must be a number of at least 0, got {context}")


def _curve(table: StepCostTable, reqs: int, context: float, largest: int) -> Curve:
    cost, plain = table.cost_ms(reqs, context), table.plain_ms(reqs, context)
    most = min(max(largest // reqs - 1, 0), _MOST_NODES)
    nodes = tuple(sorted({0, most, *(2**i - 1 for i in range(1, 20) if 2**i - 1 < most)}))
    times = tuple(float(cost[min(reqs * (1 + n), table.max_rows)]) for n in nodes)
    return Curve(reqs, nodes, times, tuple(ms / plain - 1 for ms in times), plain)


def draw_text(drawn: Curves) -> str:
    """Both figures for a terminal, one above the other."""
    legend = "   ".join(
        f"{mark} {_requests(curve.reqs)} (plain {curve.plain_ms:.4g} ms)"
        for mark, curve in zip(_MARKS, drawn.curves)
    )
    parts = [
        f"C(N), milliseconds of a step with N nodes for each request; context {drawn.context:.0f}",
        _chart(drawn.curves, lambda curve: curve.cost_ms),
        "Break-even: accepted draft tokens that a tree of N nodes needs to pay",
        _chart(drawn.curves, lambda curve: curve.break_even),
        legend,
    ]
    return "\n\n".join(parts)


def _requests(count: int) -> str:
    return f"{count} request{'s' if count > 1 else ''}"


def _chart(lines: Sequence[Curve], values: Callable[[Curve], Sequence[float]]) -> str:
    """A chart of characters: nodes + 1 on a logarithmic axis, values from 0 up."""
    most_nodes = max(curve.nodes[-1] for curve in lines)
    top = max(max(values(curve)) for curve in lines)
    low = min(0.0, *(min(values(curve)) for curve in lines))
    span = (top - low) or 1.0
    grid = [[" "] * _WIDTH for _ in range(_HEIGHT)]
    for mark, curve in reversed(list(zip(_MARKS, lines))):
        for nodes, value in zip(curve.nodes, values(curve), strict=True):
            row = _HEIGHT - 1 - round((value - low) / span * (_HEIGHT - 1))
            grid[row][_column(nodes, most_nodes)] = mark
    labels = {0: top, _HEIGHT // 2: low + span * (1 - (_HEIGHT // 2) / (_HEIGHT - 1))}
    labels[_HEIGHT - 1] = low
    out = []
    for row, cells in enumerate(grid):
        label = f"{labels[row]:9.4g}" if row in labels else " " * 9
        out.append(f"{label} ┤{''.join(cells).rstrip()}")
    ticks = [0, *(2**i - 1 for i in range(1, 20) if 2**i - 1 < most_nodes), most_nodes]
    axis, taken = [" "] * (_WIDTH + 8), -2
    for nodes in ticks:
        text, at = str(nodes), _column(nodes, most_nodes)
        if at > taken + 1:
            axis[at : at + len(text)] = text
            taken = at + len(text)
    out.append(" " * 10 + "└" + "─" * _WIDTH)
    out.append(" " * 11 + "".join(axis).rstrip() + "  N")
    return "\n".join(out)


def _column(nodes: int, most: int) -> int:
    return round(math.log2(1 + nodes) / max(math.log2(1 + most), 1e-9) * (_WIDTH - 1))


def check_matplotlib() -> None:
    """Refuse `--png` without matplotlib.

    Raises:
        RuntimeError: the text names the extra that has it.
    """
    try:
        import matplotlib.backends.backend_agg  # noqa: F401
    except ImportError as error:
        raise RuntimeError("--png needs matplotlib: pip install 'vllm-bastion[figures]'") from error


def draw_png(drawn: Curves, path: Path) -> None:
    """Both figures side by side, as a PNG. See `check_matplotlib`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.0, 4.0), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for curve in drawn.curves:
        x = [1 + nodes for nodes in curve.nodes]
        (line,) = left.plot(x, curve.cost_ms, marker="o", label=_requests(curve.reqs))
        left.axhline(curve.plain_ms, linestyle=":", color=line.get_color())
        right.plot(x, curve.break_even, marker="o", label=_requests(curve.reqs))
    left.set(title=f"C(N), context {drawn.context:.0f}; dotted: a plain step", ylabel="ms a step")
    right.set(title="The gate's break-even", ylabel="accepted draft tokens needed")
    ticks = sorted({1 + nodes for curve in drawn.curves for nodes in curve.nodes})
    for axis in (left, right):
        axis.set(xscale="log", xlabel="nodes of each request, N")
        axis.set_xticks(ticks, [str(tick - 1) for tick in ticks], fontsize=8)
        axis.minorticks_off()
        axis.set_ylim(bottom=min(0.0, axis.get_ylim()[0]))
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False)
    figure.savefig(path, format="png")
