# SPDX-License-Identifier: Apache-2.0
"""Counts the blocks of recurrent states that requests hold, for `tests.e2e.test_hybrids`."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_cache_interface import MambaSpec


def held(session: Any) -> list[dict[str, Any]]:
    """One entry per running request: its `request`, and `blocks`, held in each recurrent group.

    vLLM's null block (0), which stands for one that is no longer needed, is not counted.
    """
    groups = session.runner.kv_cache_config.kv_cache_groups
    recurrent = [i for i, group in enumerate(groups) if isinstance(group.kv_cache_spec, MambaSpec)]
    out = []
    for request in session.scheduler.running:
        ids = session.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        blocks = [len(set(ids[group]) - {0}) for group in recurrent]
        out.append({"request": request.request_id.rsplit("-", 1)[0], "blocks": blocks})
    return out
