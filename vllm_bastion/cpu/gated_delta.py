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
    mixed, b, a, out = tensors
    model = weight, layer.A_log, layer.dt_bias, *states
    ours: GatedDeltaLayer | None = saved.of_host
    if ours is None or not ours.has(*model):
        ours = saved.of_host = GatedDeltaLayer(
            *model, saved.conv_input, saved.key, saved.updates, saved.decays,
            layer.head_k_dim**-0.5,
        )  # fmt: skip
    if rows.of_host is None:
        count, trees = rows.state_rows.shape[0], rows.trees
        rows.of_host = GatedDeltaStep(
            rows.state_rows, rows.query_start_loc, trees.tail_lens[:count],
            trees.step_slots[:count], trees.parents, rows.step_rows,
        )  # fmt: skip
    ours(rows.of_host, mixed, b, a, out)
