# SPDX-License-Identifier: Apache-2.0
"""Cost tables for replay: measured ones, and the paper's A100 points.

The paper prints two points of T_verify for Qwen3-8B on an A100 with Transformers: 22.0 ms at 32
nodes and 55.9 ms at 1,024. We interpolate linearly between them and use 22.0 ms below 32. The paper
prints no drafter time. Below 32 nodes, verification is bound by the launches of 36 layers, so the
drafter's 5 layers of the same width are estimated at 5/36 of it, 3.06 ms. Cross-check: the paper's
averages for BASTION (6.61x at tau 8.48 and 139.3 nodes) imply C / T_AR = 8.48 / 6.61 = 1.283; with
T_AR = 22.0 these numbers give (25.7 + 3.06) / 22.0 = 1.307.

A mixture of experts is calculated: Qwen3-30B-A3B in bf16 on an H100 that reads 2.3 GB/ms. 3.6 GB of
weights are read in every step; of the 128 experts (0.44 GB each, all layers together) those that n
rows of 8 experts each meet if they choose evenly, 128 (1 - (1 - 8/128)^n). The drafter takes 1 ms.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from benchmarks.replay.table import StepCostTable

_LOW, _HIGH = (32, 22.0), (1024, 55.9)
_DRAFTER_MS = 22.0 * 5 / 36
_GB_PER_MS = 2.3


@dataclass(frozen=True)
class CostSource:
    """A named cost table."""

    name: str
    table: StepCostTable


def paper_a100(max_rows: int) -> CostSource:
    """The paper's points for Qwen3-8B on an A100, measured at batch 1 and applied to all rows."""
    slope = (_HIGH[1] - _LOW[1]) / (_HIGH[0] - _LOW[0])
    rows = [1, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024]
    samples = [(n, 0, _LOW[1] + slope * max(0, n - _LOW[0])) for n in rows]
    table = StepCostTable(samples, [(1, _DRAFTER_MS)], 0.0, max_rows=max_rows)
    return CostSource("paper's A100", table)


def mixture_of_experts(max_rows: int) -> CostSource:
    """Qwen3-30B-A3B on an H100, calculated from the weights that a step reads."""

    def ms(rows: int) -> float:
        experts = 128 * (1 - (1 - 8 / 128) ** rows)
        return (3.6 + 0.44 * experts) / _GB_PER_MS

    rows = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512]
    samples = [(n, 0, ms(n)) for n in (*rows, max_rows)]
    return CostSource("mixture of experts", StepCostTable(samples, [(1, 1.0)], max_rows=max_rows))


def from_profile(name: str, path: Path, max_rows: int) -> CostSource:
    """The measured costs in a file of `benchmarks/results`.

    Raises ValueError: it is not such a file.
    """
    try:
        given = json.loads(path.read_text(encoding="utf-8"))["table"]
        table = StepCostTable(
            given["samples"],
            given["drafter_samples"],
            given["aux_ms"],
            max_rows=max_rows,
            captured_sizes=given["captured_sizes"],
            plain_aux_ms=given["plain_aux_ms"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} holds no step costs: {error!r}") from error
    return CostSource(name, table)
