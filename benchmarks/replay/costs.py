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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.decoder import model_runner
from vllm_bastion.policy.cost.devices import DeviceSpec, known_device
from vllm_bastion.policy.cost.latency import LatencyModel, LatencyName
from vllm_bastion.policy.cost.models import make_latency
from vllm_bastion.policy.cost.paper import CalibratedRoofline, ModelShape, Roofline, calibrate
from vllm_bastion.policy.cost.table import StepCostTable

_LOW, _HIGH = (32, 22.0), (1024, 55.9)
_DRAFTER_MS = 22.0 * 5 / 36
_GB_PER_MS = 2.3
# Qwen3-8B in the notation of the paper's table, from its published config
_QWEN3_8B = ModelShape(36, 4096, 32, 8, 128, 12288, 151936)


@dataclass(frozen=True)
class CostSource:
    """A named cost table, and its calibrated roofline if it has one."""

    name: str
    table: StepCostTable
    calibrated: CalibratedRoofline | None

    def latency(self, name: LatencyName) -> LatencyModel:
        bare = self.calibrated.roofline if self.calibrated else None
        return make_latency(name, self.table, roofline=bare, calibrated=self.calibrated)


def paper_a100(max_rows: int) -> CostSource:
    """The paper's points for Qwen3-8B on an A100, measured at batch 1 and applied to all rows."""
    slope = (_HIGH[1] - _LOW[1]) / (_HIGH[0] - _LOW[0])
    rows = [1, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024]
    samples = [(n, 0, _LOW[1] + slope * max(0, n - _LOW[0])) for n in rows]
    table = StepCostTable(samples, [(1, _DRAFTER_MS)], 0.0, max_rows=max_rows)
    device = known_device("NVIDIA A100 80GB PCIe")
    return CostSource("paper's A100", table, calibrate(Roofline(_QWEN3_8B, device), table.samples))


def mixture_of_experts(max_rows: int) -> CostSource:
    """Qwen3-30B-A3B on an H100, calculated from the weights that a step reads."""

    def ms(rows: int) -> float:
        experts = 128 * (1 - (1 - 8 / 128) ** rows)
        return (3.6 + 0.44 * experts) / _GB_PER_MS

    rows = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512]
    samples = [(n, 0, ms(n)) for n in (*rows, max_rows)]
    return CostSource(
        "mixture of experts", StepCostTable(samples, [(1, 1.0)], max_rows=max_rows), None
    )


def from_profile(name: str, path: Path, max_rows: int) -> CostSource:
    """The measured costs in a file of `benchmarks/results`.

    Raises ValueError: it is not such a file.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        calibrated = _calibrated(data["calibrated"]) if data["calibrated"] else None
        table = table_of(data["table"], max_rows, calibrated)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} holds no step costs: {error!r}") from error
    return CostSource(name, table, calibrated)


def measured(llm: Any) -> Callable[[], tuple[dict[str, Any], CalibratedRoofline | None]]:
    """A probe of `harness.engine.Engine`: what bastion measured at its start, and the roofline."""
    table = model_runner(llm).speculator.runtime.controller.latency.table
    return lambda: (numbers_of(table), table.carrier)


def numbers_of(table: StepCostTable) -> dict[str, Any]:
    """What was measured, as JSON has it."""
    return {
        "samples": [list(sample) for sample in table.samples],
        "drafter_samples": [list(sample) for sample in table.drafter_samples],
        "position_samples": [list(sample) for sample in table.position_samples],
        "aux_ms": table.aux_ms,
        "plain_aux_ms": table.plain_aux_ms,
        "captured_sizes": list(table.captured_sizes),
    }


def table_of(
    numbers: dict[str, Any], max_rows: int, carrier: CalibratedRoofline | None = None
) -> StepCostTable:
    """The table of `numbers_of`, for an engine with at most `max_rows` rows in a step."""
    given = {name: value for name, value in numbers.items() if name != "max_rows"}
    return StepCostTable(**given, max_rows=max_rows, carrier=carrier)


def _calibrated(data: dict[str, Any]) -> CalibratedRoofline:
    bare = data["roofline"]
    roofline = Roofline(ModelShape(**bare["shape"]), DeviceSpec(**bare["device"]))
    return CalibratedRoofline(**(data | {"roofline": roofline}))
