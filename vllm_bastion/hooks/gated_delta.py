# SPDX-License-Identifier: Apache-2.0
"""Hooks for targets with gated delta networks, installed with the runner's for these alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from vllm_bastion.config import bastion_config
from vllm_bastion.hooks.ledger import Hook

_HYBRID_WORKER = 'a worker of method "bastion" whose target has gated delta layers'
_CPU = "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention"
_LAYER = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn:QwenGatedDeltaNetAttention"

GATED_DELTA_HOOKS: tuple[Hook, ...] = (
    Hook(
        target="vllm.model_executor.layers.mamba.abstract:MambaBase.get_kv_cache_spec",
        wrapper="gated_delta:get_kv_cache_spec",
        expects="(self, vllm_config)",
        why="a state for each of N draft tokens, and N inputs more of the convolution",
        what="one state a request",
        upstream="speculative methods say how many states they need",
        when=_HYBRID_WORKER,
    ),
    Hook(
        target="vllm.platforms.interface:Platform._align_hybrid_block_size",
        wrapper="gated_delta:align_block_size",
        expects="(cls, vllm_config, backend_cls)",
        why="it makes attention's pages as large as a state with N inputs more",
        what="counts the state as it is",
        upstream="as above",
        when=_HYBRID_WORKER,
    ),
    Hook(
        target=f"{_CPU}:_cpu_gdn_attention_nonspec",
        wrapper="gated_delta:cpu_gdn_attention",
        expects="(layer, attn_metadata_i, mixed_qkv, b, a, core_attn_out)",
        why="with one state a request it knows rows without drafts only",
        what="takes the rows of trees and chains out, and leaves it the prompts",
        upstream="a tree-capable recurrence",
        when=_HYBRID_WORKER,
    ),
    Hook(
        target=f"{_LAYER}._forward_core",
        wrapper="gated_delta:forward_core",
        expects="(self, mixed_qkv, b, a, core_attn_out)",
        why="its rows with drafts are a chain, with a state kept after each",
        what="takes the rows of trees and chains out, and leaves it the prompts",
        upstream="a tree-capable recurrence",
        when=_HYBRID_WORKER,
    ),
    Hook(
        target=f"{_LAYER}._can_use_fused_gdn_mtp_decode",
        wrapper="gated_delta:can_use_fused_decode",
        expects="(self, attn_metadata)",
        why="it takes up to 8 states a request for a kernel that goes past _forward_core",
        what="says no to a step with rows of ours",
        upstream="a tree-capable recurrence",
        when=_HYBRID_WORKER,
    ),
)


def get_kv_cache_spec(original: Callable[..., Any], self: Any, vllm_config: Any) -> Any:
    """One state a request, whose convolution has the inputs before the step only."""
    if bastion_config(vllm_config) is None:
        return original(self, vllm_config)
    self.num_spec = 0
    return replace(original(self, vllm_config), num_speculative_blocks=0)


def align_block_size(
    original: Callable[..., Any], cls: Any, vllm_config: Any, backend_cls: Any
) -> Any:
    """Page sizes as without speculative decoding; what is written goes to the cache's config."""
    if bastion_config(vllm_config) is not None:
        vllm_config = copy.copy(vllm_config)
        vllm_config.speculative_config = None
    return original(cls, vllm_config, backend_cls)


def cpu_gdn_attention(
    original: Callable[..., Any],
    layer: Any,
    attn_metadata_i: Any,
    mixed_qkv: Any,
    b: Any,
    a: Any,
    core_attn_out: Any,
) -> None:
    """Rows of trees and chains by our op, prompts by vLLM's."""
    given = (mixed_qkv, b, a, core_attn_out)

    def usual(metadata: Any, *step: Any) -> None:
        original(layer, metadata, *step)

    if getattr(attn_metadata_i, "tree_rows", None) is None:
        usual(attn_metadata_i, *given)
    else:
        _by_kind(usual, layer, attn_metadata_i, *given)


def forward_core(
    original: Callable[..., Any], self: Any, mixed_qkv: Any, b: Any, a: Any, core_attn_out: Any
) -> None:
    """As `cpu_gdn_attention`, where the layer looks its metadata up."""
    from vllm.forward_context import get_forward_context

    given, of_layers = (mixed_qkv, b, a, core_attn_out), get_forward_context().attn_metadata
    metadata = of_layers.get(self.prefix) if isinstance(of_layers, dict) else None

    def usual(metadata: Any, *step: Any) -> None:
        before, of_layers[self.prefix] = of_layers[self.prefix], metadata
        try:
            original(self, *step)
        finally:
            of_layers[self.prefix] = before

    if getattr(metadata, "tree_rows", None) is None:
        original(self, *given)
    else:
        _by_kind(usual, self, metadata, *given)


def can_use_fused_decode(original: Callable[..., Any], self: Any, attn_metadata: Any) -> Any:
    """Not with rows of trees or chains."""
    return getattr(attn_metadata, "tree_rows", None) is None and original(self, attn_metadata)


def _by_kind(
    usual: Callable[..., Any],
    layer: Any,
    metadata: Any,
    mixed_qkv: Any,
    b: Any,
    a: Any,
    core_attn_out: Any,
) -> None:
    from vllm_bastion.attention.gated_delta import run_tree_rows

    count = metadata.num_actual_tokens
    given, out = [x[:count] for x in (mixed_qkv, b, a)], core_attn_out[:count]
    run_tree_rows(layer, metadata.tree_rows, given[0], given[1], given[2], out)
    if metadata.num_prefills:
        prompts = metadata.non_spec_token_indx
        found = out.new_zeros(len(prompts), *out.shape[1:])
        plain = replace(
            metadata,
            spec_sequence_masks=None,
            num_accepted_tokens=None,
            num_actual_tokens=len(prompts),
        )
        usual(plain, *(x.index_select(0, prompts) for x in given), found)
        out.index_copy_(0, prompts, found)
