# SPDX-License-Identifier: Apache-2.0
"""Wrappers for targets with gated delta layers, installed with the runner's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from vllm_bastion.attention.gated_delta import run_tree_rows
from vllm_bastion.config import bastion_config


def get_kv_cache_spec(original: Callable[..., Any], self: Any, vllm_config: Any) -> Any:
    """One state per request, without convolution inputs for draft tokens."""
    if bastion_config(vllm_config) is None:
        return original(self, vllm_config)
    self.num_spec = 0
    return replace(original(self, vllm_config), num_speculative_blocks=0)


def align_block_size(
    original: Callable[..., Any], cls: Any, vllm_config: Any, backend_cls: Any
) -> Any:
    """Page sizes as without speculative decoding. The result is written to the cache's config."""
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
    """Run trees and chains on our op, prompts on vLLM's."""

    def run_prompts(metadata: Any, *rows: Any) -> None:
        original(layer, metadata, *rows)

    rows = (mixed_qkv, b, a, core_attn_out)
    if _has_tree_rows(attn_metadata_i):
        _split(run_prompts, layer, attn_metadata_i, *rows)
    else:
        original(layer, attn_metadata_i, *rows)


def forward_core(
    original: Callable[..., Any], self: Any, mixed_qkv: Any, b: Any, a: Any, core_attn_out: Any
) -> None:
    """As `cpu_gdn_attention`; this version of the layer looks its metadata up by name."""
    from vllm.forward_context import get_forward_context

    rows, by_layer = (mixed_qkv, b, a, core_attn_out), get_forward_context().attn_metadata
    metadata = by_layer.get(self.prefix) if isinstance(by_layer, dict) else None

    def run_prompts(prompts: Any, *rows: Any) -> None:
        by_layer[self.prefix] = prompts
        try:
            original(self, *rows)
        finally:
            by_layer[self.prefix] = metadata

    if _has_tree_rows(metadata):
        _split(run_prompts, self, metadata, *rows)
    else:
        original(self, *rows)


def can_use_fused_decode(original: Callable[..., Any], self: Any, attn_metadata: Any) -> Any:
    """Not in a step with trees or chains."""
    return not _has_tree_rows(attn_metadata) and original(self, attn_metadata)


def _has_tree_rows(metadata: Any) -> bool:
    return getattr(metadata, "tree_rows", None) is not None


def _split(
    run_prompts: Callable[..., Any],
    layer: Any,
    metadata: Any,
    mixed_qkv: Any,
    b: Any,
    a: Any,
    core_attn_out: Any,
) -> None:
    count = metadata.num_actual_tokens
    rows, out = [x[:count] for x in (mixed_qkv, b, a)], core_attn_out[:count]
    run_tree_rows(layer, metadata.tree_rows, rows[0], rows[1], rows[2], out)
    if metadata.num_prefills:
        indices = metadata.non_spec_token_indx
        prompt_out = out.new_zeros(len(indices), *out.shape[1:])
        prompts = replace(
            metadata,
            tree_rows=None,
            spec_sequence_masks=None,
            num_accepted_tokens=None,
            num_actual_tokens=len(indices),
        )
        run_prompts(prompts, *(x.index_select(0, indices) for x in rows), prompt_out)
        out.index_copy_(0, indices, prompt_out)
