# SPDX-License-Identifier: Apache-2.0
"""Hooks for targets with gated delta networks, installed with the runner's for these alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from vllm_bastion.config import bastion_config
from vllm_bastion.hooks import Hook

_CPU = "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention"

HYBRID_HOOKS: tuple[Hook, ...] = (
    Hook(
        target="vllm.model_executor.layers.mamba.abstract:MambaBase.get_kv_cache_spec",
        wrapper="hybrid:get_kv_cache_spec",
        expects="(self, vllm_config)",
        why="a state for each of N draft tokens, and N inputs more of the convolution",
        what="one state a request",
        upstream="speculative methods say how many states they need",
    ),
    Hook(
        target="vllm.platforms.interface:Platform._align_hybrid_block_size",
        wrapper="hybrid:align_block_size",
        expects="(cls, vllm_config, backend_cls)",
        why="it makes attention's pages as large as a state with N inputs more",
        what="counts the state as it is",
        upstream="as above",
    ),
    Hook(
        target=f"{_CPU}:_cpu_gdn_attention_nonspec",
        wrapper="hybrid:cpu_gdn_attention",
        expects="(layer, attn_metadata_i, mixed_qkv, b, a, core_attn_out)",
        why="with one state a request it knows rows without drafts only",
        what="takes the rows of trees and chains out, and leaves it the prompts",
        upstream="a tree-capable recurrence",
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
    metadata, rows = attn_metadata_i, getattr(attn_metadata_i, "tree_rows", None)
    if rows is None:
        original(layer, metadata, mixed_qkv, b, a, core_attn_out)
        return
    from vllm_bastion.attention.gdn_cpu import run_tree_rows

    count = metadata.num_actual_tokens
    step = (mixed_qkv[:count], b[:count], a[:count], core_attn_out[:count])
    run_tree_rows(layer, rows, *step)
    if metadata.num_prefills:
        prompts = metadata.non_spec_token_indx
        out = core_attn_out.new_zeros(len(prompts), *core_attn_out.shape[1:])
        plain = replace(metadata, spec_sequence_masks=None, num_accepted_tokens=None)
        original(layer, plain, *(x[prompts] for x in step[:3]), out)
        core_attn_out[prompts] = out
