# SPDX-License-Identifier: Apache-2.0
"""What steps cost, for replay: measured curves, and the paper's A100 points.

The paper prints two points of T_verify for Qwen3-8B on an A100 with Transformers: 22.0 ms at 32
nodes and 55.9 ms at 1,024. We interpolate linearly between them and use 22.0 ms below 32. The paper
prints no drafter time. Below 32 nodes, verification is bound by the launches of 36 layers, so the
drafter's 5 layers of the same width are estimated at 5/36 of it, 3.06 ms. Cross-check: the paper's
averages for BASTION (6.61x at tau 8.48 and 139.3 nodes) imply C / T_AR = 8.48 / 6.61 = 1.283; with
T_AR = 22.0 these numbers give (25.7 + 3.06) / 22.0 = 1.307.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression


class Costs:
    """Milliseconds of a step by its query tokens ("rows").

    Args:
        samples: (rows, ms) of the target's forward pass.
        drafter: (requests, ms) of a drafter's pass.
        aux_ms: time of a step with trees that is neither.
        plain_aux_ms: the same of a step that drafts nothing.
        captured_sizes: sizes of the CUDA graphs, to which a step is padded.
    """

    def __init__(
        self,
        samples: Iterable[tuple[float, float]],
        drafter: Iterable[tuple[float, float]],
        *,
        max_rows: int,
        aux_ms: float = 0.0,
        plain_aux_ms: float = 0.0,
        captured_sizes: Sequence[int] = (),
    ) -> None:
        self.aux_ms, self.plain_aux_ms = aux_ms, plain_aux_ms
        rows, sizes = np.arange(max_rows + 1.0), np.array(sorted(captured_sizes))
        at = np.searchsorted(sizes, rows)
        rows[at < len(sizes)] = sizes[at[at < len(sizes)]]
        self.forward_ms: NDArray[np.float64] = _curve(samples, rows)
        self.draft_ms: NDArray[np.float64] = _curve(drafter, np.arange(max_rows + 1.0))

    def tree_step_ms(self, num_reqs: int) -> NDArray[np.float64]:
        """[max_rows + 1] ms of a step with trees, by its rows."""
        return self.forward_ms + self.draft_ms[num_reqs] + self.aux_ms


def _curve(samples: Iterable[tuple[float, float]], at: NDArray[np.float64]) -> NDArray[np.float64]:
    """Through the medians of samples, fitted so that it never falls, and on along its last line."""
    times = defaultdict[float, list[float]](list)
    for x, ms in samples:
        times[x].append(ms)
    xs = np.array(sorted(times))
    ms = isotonic_regression([float(np.median(times[x])) for x in xs]).x
    slope = (ms[-1] - ms[-2]) / (xs[-1] - xs[-2]) if len(xs) > 1 else 0.0
    return np.interp(at, xs, ms) + slope * np.maximum(at - xs[-1], 0.0)


def paper_a100(max_rows: int) -> Costs:
    """The paper's points for Qwen3-8B on an A100, measured at batch 1 and applied to all rows."""
    points = [(1, 22.0), (32, 22.0), (1024, 55.9)]
    return Costs(points, [(1, 22.0 * 5 / 36)], max_rows=max_rows)


def measured(path: Path, max_rows: int) -> Costs:
    """The costs in a file of `benchmarks/results`, of a forward pass over short contexts.

    Raises ValueError: it is not such a file.
    """
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
        own = {name: given[name] for name in ("aux_ms", "plain_aux_ms", "captured_sizes")}
        return Costs(given["forward"], given["drafter"], max_rows=max_rows, **own)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} holds no step costs: {error!r}") from error
