# SPDX-License-Identifier: Apache-2.0
"""Counts the recurrent states of requests, for `tests.e2e.test_hybrids`."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_cache_interface import MambaSpec


def recurrent_blocks(session: Any) -> list[dict[str, Any]]:
    """Per running request: its number of `blocks` in each recurrent group, and their `bytes`.

    vLLM's null block (0), which replaces a block that is no longer needed, is not counted. A block
    holds a state for each of the group's layers.
    """
    groups = session.runner.kv_cache_config.kv_cache_groups
    recurrent = {
        i: group.kv_cache_spec.page_size_bytes * len(group.layer_names)
        for i, group in enumerate(groups)
        if isinstance(group.kv_cache_spec, MambaSpec)
    }
    out = []
    for request in session.scheduler.running:
        ids = session.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        blocks = {group: len(set(ids[group]) - {0}) for group in recurrent}
        size = sum(blocks[group] * recurrent[group] for group in recurrent)
        out.append({"blocks": list(blocks.values()), "bytes": size})
    return out
