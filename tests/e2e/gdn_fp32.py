# SPDX-License-Identifier: Apache-2.0
"""Gated delta networks in fp32 on a CPU, token by token, for plain decoding and for prompts.

vLLM's CPU kernels support bf16 only, and in bf16 two correct engines soon disagree on a random
model, so tokens could not be compared. Patched before the engine is built. Method "bastion" handles
its own rows before this code runs, as it does with vLLM's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from vllm.forward_context import get_forward_context
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name


def core(
    mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, core_attn_out: torch.Tensor,
    layer_name: LayerNameType,
) -> None:  # fmt: skip
    """vLLM's op without its check of the dtype."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    context = get_forward_context()
    layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
    if context.attn_metadata is None:
        return
    metadata = context.attn_metadata[layer.prefix]
    gdn_attention._cpu_gdn_attention_nonspec(layer, metadata, mixed_qkv, b, a, core_attn_out)


def recurrence(
    layer: Any, attn_metadata_i: Any, mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor,
    core_attn_out: torch.Tensor,
) -> None:  # fmt: skip
    """Process each request's rows in order, and write states in place."""
    metadata = attn_metadata_i
    weight = layer.conv1d.weight.view(layer.conv1d.weight.shape[0], -1)
    starts = metadata.non_spec_query_start_loc.tolist()
    fresh = metadata.has_initial_state
    for i in range(metadata.num_decodes + metadata.num_prefills):
        place = int(metadata.non_spec_state_indices_tensor[i])
        conv, state = layer.kv_cache[0][place], layer.kv_cache[1][place]
        if fresh is not None and not fresh[i]:
            conv.zero_()
            state.zero_()
        for row in range(starts[i], starts[i + 1]):
            inputs = torch.cat([conv, mixed_qkv[row : row + 1]])
            conv.copy_(inputs[1:])
            x = F.silu((inputs * weight.T).sum(0))[None]
            query, key, value = (part[0, 0] for part in layer.rearrange_mixed_qkv(x))
            query, key = (
                (p * torch.rsqrt(p.square().sum(-1, keepdim=True) + 1e-6)).repeat_interleave(
                    len(value) // len(p), 0
                )
                for p in (query, key)
            )
            gate = -layer.A_log.float().exp() * F.softplus(a[row].float() + layer.dt_bias.float())
            # the cache holds [H, K, V], although its shape differs
            memory = state.view(len(value), layer.head_k_dim, -1)
            memory *= gate.exp()[:, None, None]
            recalled = (memory * key[..., None]).sum(1)
            beta = b[row].float().sigmoid()[:, None]
            memory += key[..., None] * (beta * (value - recalled))[:, None]
            core_attn_out[row] = (memory * query[..., None]).sum(1) * layer.head_k_dim**-0.5


def install() -> None:
    """Replace both of vLLM's ops, and a Triton kernel that plain decoding does not need."""
    import vllm.v1.worker.cpu_worker  # noqa: F401  before any module of the V2 runner
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState
    from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

    gdn_attention.cpu_gdn_attention_core = core
    gdn_attention._cpu_gdn_attention_nonspec = recurrence
    # counts accepted tokens, which plain decoding does not read
    MambaHybridModelState.postprocess_state = DefaultModelState.postprocess_state
