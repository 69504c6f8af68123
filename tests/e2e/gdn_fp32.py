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

from tests.e2e.cuda_graphs import kernel


def core(
    mixed_qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    core_attn_out: torch.Tensor,
    layer_name: LayerNameType,
) -> None:
    """vLLM's op without its check of the dtype."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    context = get_forward_context()
    layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
    if context.attn_metadata is None:
        return
    metadata = context.attn_metadata[layer.prefix]
    gdn_attention._cpu_gdn_attention_nonspec(layer, metadata, mixed_qkv, b, a, core_attn_out)


def recurrence(
    layer: Any,
    attn_metadata_i: Any,
    mixed_qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    core_attn_out: torch.Tensor,
) -> None:
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
            # on a CPU the cache holds [H, K, V], although its shape differs
            on_cpu = layer._forward_method == layer.forward_cpu
            memory = state.view(len(value), layer.head_k_dim, -1) if on_cpu else state.mT
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


# ---- the version for CUDA, used with `flash_backend` ------------------------------------

_prompts = kernel(recurrence)


def forward_core(
    self: Any, mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, core_attn_out: Any
) -> None:
    """Replaces vLLM's kernel: requests without rows of ours."""
    of_layers = get_forward_context().attn_metadata
    if of_layers is not None:
        metadata = of_layers[self.prefix]
        assert metadata.spec_sequence_masks is None
        _prompts(self, metadata, mixed_qkv, b, a, core_attn_out)


def install_cuda() -> None:
    """Use the layer's CUDA Python in this process, together with `cuda_graphs.install`.

    Convolution, recurrence and commit of trees are our Triton kernels, in the interpreter. vLLM's
    kernels for prompts need a GPU: the recurrence above runs on states in CUDA's layout.
    """
    import vllm.v1.worker.cpu_worker  # noqa: F401  before any module of the V2 runner
    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as module

    layer = module.QwenGatedDeltaNetAttention
    init = layer.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self._forward_method = self.forward_cuda

    layer.__init__ = __init__
    layer._forward_core = forward_core
    # The tape then records the launches inside.
    torch.ops.vllm.qwen_gdn_attention_core = module.qwen_gdn_attention_core
