# SPDX-License-Identifier: Apache-2.0
"""The gated delta networks of a target on CPU machines: a tree's rows by our op.

vLLM's layer projects and normalises; between them its core has a short convolution and the
recurrence. Both are ours for the rows of trees and chains, and vLLM's for prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from bastion_kernels import gated_delta_tree, short_conv_tree
from vllm_bastion.step.trees import Trees


@dataclass
class TreeRows:
    """The rows of a step that are ours, for the layers of one KV-cache group."""

    trees: Trees
    # [R + 1] int32; [R] int32, the request's state, -1 for a prompt's
    query_start_loc: torch.Tensor
    state_rows: torch.Tensor


@dataclass
class Kept:
    """What a layer's forward pass leaves for acceptance, by row of the step; see the kernels."""

    conv_input: torch.Tensor  # [T, C]
    key: torch.Tensor  # [T, Hk, K]
    updates: torch.Tensor  # [T, H, V] fp32
    decays: torch.Tensor  # [T, H] fp64
    rows: TreeRows


def states_of(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of a layer's states: `[B, C, W - 1]`, oldest input first, and `[B, H, K, V]`."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    return gdn_attention._conv_buffer_view(layer), gdn_attention._ssm_state_view(layer)


def run_tree_rows(
    layer: Any,
    rows: TreeRows,
    mixed_qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Convolution and recurrence of the rows in `rows`; others' stay as they are.

    mixed_qkv: [T, C]; b, a: [T, H]; out: [T, H, V], written.
    """
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    trees, num_reqs = rows.trees, rows.state_rows.shape[0]
    conv_state, state = states_of(layer)
    place = (rows.state_rows, rows.query_start_loc)
    tree = (trees.tail_lens[:num_reqs], trees.step_slots[:num_reqs])
    mixed = torch.zeros_like(mixed_qkv)
    weight = gdn_attention._unpacked_conv_weight(layer)
    short_conv_tree(mixed_qkv, weight, conv_state, *place, *tree, trees.parents, mixed)
    query, key, value = (x[0] for x in layer.rearrange_mixed_qkv(mixed))
    query, key = (
        x * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + 1e-6) for x in (query, key)
    )
    gate = -layer.A_log.float().exp() * F.softplus(a.float() + layer.dt_bias.float())
    count, heads, width = value.shape
    kept = Kept(
        conv_input=mixed_qkv.clone(),
        key=key,
        updates=torch.zeros(count, heads, width, dtype=torch.float32),
        decays=torch.zeros(count, heads, dtype=torch.float64),
        rows=rows,
    )
    gated_delta_tree(
        query, key, value, gate, b.float().sigmoid(), state, *place, *tree, trees.bits,
        layer.head_k_dim**-0.5, out, kept.updates, kept.decays,
    )  # fmt: skip
    layer.bastion_kept = kept
