# SPDX-License-Identifier: Apache-2.0
"""The gated delta layers of a target: our ops for the rows of trees and chains.

vLLM's layer projects and normalises. Its core has a short convolution and the recurrence; we run
both for trees and chains, and vLLM runs both for prompts. A FULL graph holds the launches of one
step and is replayed for all, so every tensor that a launch reads or writes is a buffer that lives
as long as the engine. On a CPU one call runs both, and the steps between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

from bastion_kernels import gated_delta_tree, short_conv_tree
from bastion_kernels.op import load
from vllm_bastion.policy.trees import Trees


class CommitInputs(NamedTuple):
    """What a layer's forward pass saves for the commit after acceptance, by tree row.

    With a leading [L] for all layers. M: most tree rows of a step; see the kernels.
    """

    conv_input: torch.Tensor  # [M, C]
    key: torch.Tensor  # [M, Hk, K]
    updates: torch.Tensor  # [M, H, V] fp32
    decays: torch.Tensor  # [M, H] fp64

    def of_layer(self, index: int) -> CommitInputs:
        """The part of one layer, by its index in `allocate`'s list."""
        return CommitInputs(*(x[index] for x in self))


def allocate(
    layers: list[Any], max_rows: int, dtype: torch.dtype, device: torch.device
) -> CommitInputs:
    """Buffers of all layers for steps of up to M = max_rows tree rows.

    Raises:
        ValueError: the layers differ in size.
    """
    names = ("num_v_heads", "num_k_heads", "head_k_dim", "head_v_dim", "conv_dim", "tp_size")
    sizes = {tuple(getattr(layer, name) for name in names) for layer in layers}
    if len(sizes) != 1:
        raise ValueError("method 'bastion' needs gated delta networks of one size in all layers")
    heads, key_heads, dim, width, channels, ranks = sizes.pop()

    def rows(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(len(layers), max_rows, *shape, dtype=dtype, device=device)

    return CommitInputs(
        rows(channels // ranks),
        rows(key_heads // ranks, dim),
        rows(heads // ranks, width, dtype=torch.float32),
        rows(heads // ranks, dtype=torch.float64),
    )


@dataclass
class TreeRows:
    """The tree rows of a step, for the layers of one KV-cache group. R requests."""

    trees: Trees
    # [R + 1] int32, first tree row of each request; a prompt has none
    query_start_loc: torch.Tensor
    # [R] int32, the request's state; -1 for a prompt's
    state_rows: torch.Tensor
    # [n] int64, the tree rows among the rows of the step; None where all are tree rows
    step_rows: torch.Tensor | None
    # by layer name
    commit_inputs: Mapping[str, CommitInputs]


@dataclass(kw_only=True)
class GatedDeltaTreeMetadata(GDNAttentionMetadata):
    """What `GatedDeltaModelState` makes of vLLM's metadata in a step with tree rows."""

    tree_rows: TreeRows | None


def _on_cpu(layer: Any) -> bool:
    """Whether vLLM runs its CPU version of the layer, which stores states and weights its own way.

    A property of the layer and not of the host: tests run the CUDA version on a CPU.
    """
    return bool(layer._forward_method == layer.forward_cpu)


def states_of(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of a layer's states: `[B, C, W - 1]`, oldest input first, and `[B, H, K, V]`."""
    if _on_cpu(layer):
        from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

        return gdn_attention._conv_buffer_view(layer), gdn_attention._ssm_state_view(layer)
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    conv_state, state = layer.kv_cache
    return conv_state if is_conv_state_dim_first() else conv_state.mT, state.mT


def _weight_of(layer: Any) -> torch.Tensor:
    """The convolution's weight, `[C, W]`."""
    if _on_cpu(layer):
        from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

        weight: torch.Tensor = gdn_attention._unpacked_conv_weight(layer)
        return weight
    return torch.as_tensor(layer.conv1d.weight).squeeze(1)


def _inputs_of(
    layer: Any, mixed: torch.Tensor, b: torch.Tensor, a: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Query, key (normalised), value, gate and beta of convolved rows `[n, C]`."""
    from vllm.third_party.flash_linear_attention.ops import fused_post_conv_prep

    sizes = (layer.num_k_heads // layer.tp_size, layer.head_k_dim, layer.head_v_dim)
    prepared: tuple[torch.Tensor, ...] = fused_post_conv_prep(
        mixed, a, b, layer.A_log, layer.dt_bias, *sizes
    )
    return prepared


def run_tree_rows(
    layer: Any,
    rows: TreeRows,
    mixed_qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Convolution and recurrence of the tree rows; leaves other rows of `out` as they are.

    mixed_qkv: [T, C]; b, a: [T, H]; out: [T, H, V], written.
    """
    saved, step_rows = rows.commit_inputs[layer.prefix], rows.step_rows
    weight, (conv_state, state) = _weight_of(layer), states_of(layer)
    trees, num_reqs = rows.trees, rows.state_rows.shape[0]
    requests = (rows.state_rows, rows.query_start_loc)
    tree = (trees.tail_lens[:num_reqs], trees.step_slots[:num_reqs])
    scale = layer.head_k_dim**-0.5
    if _on_cpu(layer):
        run = load("bastion_kernels.cpu.gated_delta", "gated_delta_layer")
        run(
            weight, layer.A_log, layer.dt_bias, conv_state, state, saved, scale,
            (*requests, *tree, trees.parents), step_rows, mixed_qkv, b, a, out,
        )  # fmt: skip
        return
    if step_rows is not None:
        mixed_qkv, b, a = (x.index_select(0, step_rows) for x in (mixed_qkv, b, a))
    # A graph's padding may exceed the tree rows that a step can have.
    count = min(len(mixed_qkv), len(saved.key))
    mixed_qkv, b, a = (x[:count] for x in (mixed_qkv, b, a))
    conv_input, key = saved.conv_input[:count], saved.key[:count]
    conv_input.copy_(mixed_qkv)
    mixed = torch.empty_like(conv_input)
    short_conv_tree(conv_input, weight, conv_state, *requests, *tree, trees.parents, mixed)
    query, own_key, value, gate, beta = _inputs_of(layer, mixed, b, a)
    key.copy_(own_key)
    result = out[:count] if step_rows is None else out.new_empty(count, *out.shape[1:])
    gated_delta_tree(
        query, key, value, gate, beta, state, *requests, *tree, trees.bits,
        scale, result, saved.updates, saved.decays,
    )  # fmt: skip
    if step_rows is not None:
        out.index_copy_(0, step_rows, result)
