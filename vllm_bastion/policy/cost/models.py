# SPDX-License-Identifier: Apache-2.0
"""The latency model that `bastion_latency_model` names."""

from __future__ import annotations

from typing import get_args

from vllm_bastion.policy.cost.corrected import CorrectedLatency
from vllm_bastion.policy.cost.forward_times import Carrier
from vllm_bastion.policy.cost.latency import LatencyModel, LatencyName
from vllm_bastion.policy.cost.paper import CurveLatency
from vllm_bastion.policy.cost.table import StepCostTable


def make_latency(
    name: LatencyName,
    table: StepCostTable,
    *,
    roofline: Carrier | None = None,
    calibrated: Carrier | None = None,
) -> LatencyModel:
    """The latency model of that name.

    Args:
        name: value of `bastion_latency_model`.
        table: the measured step-cost table.
        roofline: the bare roofline, for `ema`.
        calibrated: the calibrated roofline, for `static` and `ema_calib`.

    Raises:
        ValueError: the name is unknown, or the roofline that it needs is missing.
    """
    if name == "table":
        return CurveLatency(table)
    if name == "ema_table":
        return CorrectedLatency(table)
    if name not in get_args(LatencyName):
        names = ", ".join(get_args(LatencyName))
        raise ValueError(f"bastion_latency_model must be one of {names}, got {name!r}")
    curve = roofline if name == "ema" else calibrated
    if curve is None:
        raise ValueError(
            f"bastion_latency_model {name!r} needs a roofline of the target, and there is none for "
            "this model; use 'ema_table'"
        )
    return CurveLatency(table, curve, online=name != "static")
