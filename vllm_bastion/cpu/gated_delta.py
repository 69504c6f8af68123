# SPDX-License-Identifier: Apache-2.0
"""A gated delta layer's tree rows in one call of our kernel; see `vllm_bastion.host`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from bastion_kernels.cpu.gated_delta import GatedDeltaLayer, GatedDeltaStep


def run(
    layer: Any,
    weight: Tensor,
    states: tuple[Tensor, Tensor],
    rows: Any,
    saved: Any,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    ours = GatedDeltaLayer(
        weight, layer.A_log, layer.dt_bias, *states, saved.conv_input, saved.key, saved.updates,
        saved.decays, layer.head_k_dim**-0.5,
    )  # fmt: skip
    count, trees = rows.state_rows.shape[0], rows.trees
    step = GatedDeltaStep(
        rows.state_rows, rows.query_start_loc, trees.tail_lens[:count], trees.step_slots[:count],
        trees.parents, rows.step_rows,
    )  # fmt: skip
    ours(step, *tensors)
