# SPDX-License-Identifier: Apache-2.0
"""A KV connector for vLLM on a CPU: whole blocks, in a folder, saved at the end of each step.

vLLM's connectors that save then need a GPU or a package. This one uses vLLM's interface as they
do: of each request it saves the blocks whose tokens were known when the step was scheduled, so
blocks of decoded text too, and loads what it finds of a prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)


@dataclass
class Blocks(KVConnectorMetadata):
    """File stem and block of what a step loads and saves."""

    load: list[tuple[str, int]] = field(default_factory=list)
    save: list[tuple[str, int]] = field(default_factory=list)


class StepEndConnector(KVConnectorBase_V1):
    """`folder` is in its extra configuration."""

    saves_at_step_end = True

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._folder = Path(self._kv_transfer_config.kv_connector_extra_config["folder"])
        self._folder.mkdir(parents=True, exist_ok=True)
        (group,) = kv_cache_config.kv_cache_groups
        self._size = group.kv_cache_spec.block_size
        self._requests: dict[str, Any] = {}
        self._blocks: dict[str, list[int]] = {}
        self._loads: list[tuple[str, int]] = []
        self._saved: set[str] = set()

    def _stems(self, tokens: list[int]) -> list[str]:
        """A name for every full block of a text: of all tokens up to its end."""
        ends = range(self._size, len(tokens) + 1, self._size)
        return [sha256(repr(tokens[:end]).encode()).hexdigest()[:24] for end in ends]

    # ---- the worker's side --------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for stem, block in self._get_connector_metadata().load:
            for name, rows in torch.load(self._folder / stem).items():
                self._caches[name][block].copy_(rows)

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        return

    def wait_for_save(self) -> None:
        for stem, block in self._get_connector_metadata().save:
            rows = {name: kv[block].clone() for name, kv in self._caches.items()}
            torch.save(rows, self._folder / stem)

    # ---- the scheduler's side -----------------------------------------------------------

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        # Others hand so many tokens' blocks to another engine: none of a path that was cut.
        assert request.num_computed_tokens < request.num_tokens
        return False, None

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        self._requests[request.request_id] = request
        found = 0
        for stem in self._stems(list(request.all_token_ids)[: request.num_tokens - 1]):
            if not (self._folder / stem).exists():
                break
            found += self._size
        return max(0, found - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._blocks[request.request_id] = ids = list(blocks.get_block_ids()[0])
        if num_external_tokens:
            stems = self._stems(list(request.all_token_ids))
            last = (request.num_computed_tokens + num_external_tokens) // self._size
            # The blocks that were cached here come first.
            first = last - num_external_tokens // self._size
            self._loads += list(zip(stems[first:last], ids[first:last], strict=True))

    def build_connector_meta(self, scheduler_output: Any) -> Blocks:
        for new in scheduler_output.scheduled_new_reqs:
            self._blocks[new.req_id] = list(new.block_ids[0])
        cached = scheduler_output.scheduled_cached_reqs
        for name, more in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if name in cached.resumed_req_ids:
                self._blocks[name] = list(more[0])
            elif more is not None:
                self._blocks[name] += more[0]
        loads, self._loads = self._loads, []
        return Blocks(loads, list(self._to_save(scheduler_output.num_scheduled_tokens)))

    def _to_save(self, scheduled: dict[str, int]) -> list[tuple[str, int]]:
        out = []
        for name, rows in scheduled.items():
            request = self._requests[name]
            # Of what is scheduled, drafts and placeholders are no tokens yet.
            known = min(request.num_tokens, request.num_computed_tokens + rows)
            stems = self._stems(list(request.all_token_ids)[:known])
            for stem, block in zip(stems, self._blocks[name], strict=False):
                if stem not in self._saved:
                    self._saved.add(stem)
                    out.append((stem, block))
        return out
