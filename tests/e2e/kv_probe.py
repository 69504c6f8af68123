# SPDX-License-Identifier: Apache-2.0
"""Reads KV blocks out of a running engine, for `tests.e2e.test_kv_bits`."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention


def full_blocks(session: Any) -> list[dict[str, Any]]:
    """For every running request: the content of its blocks that hold only computed tokens.

    A block is hashed as a whole, so the backend's layout within a block does not matter.

    Returns:
        One entry per request with `request`, `computed` (tokens), `emitted` (tokens) and `blocks`:
        layer -> a digest of each block. The names of the drafter's layers start with `draft.`.
    """
    size = session.scheduler.cache_config.block_size
    layers = get_layers_from_vllm_config(session.runner.vllm_config, Attention)
    out = []
    for request in session.scheduler.running:
        ids = session.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        assert len(ids) == 1 or len({len(group) for group in ids}) == 1
        full = request.num_computed_tokens // size
        content = {}
        for name, layer in layers.items():
            group = _group_of(session, name)
            kind = "draft." if getattr(layer, "is_draft_layer", False) else "target."
            blocks = layer.kv_cache[torch.tensor(ids[group][:full], dtype=torch.int64)]
            content[kind + name] = [
                hashlib.sha256(block.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
                for block in blocks
            ]
        out.append(
            {
                "request": request.request_id.rsplit("-", 1)[0],
                "computed": request.num_computed_tokens,
                "emitted": request.num_output_tokens,
                "blocks": content,
            }
        )
    return out


def _group_of(session: Any, layer: str) -> int:
    groups = session.runner.kv_cache_config.kv_cache_groups
    return next(i for i, group in enumerate(groups) if layer in group.layer_names)
