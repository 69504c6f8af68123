# SPDX-License-Identifier: Apache-2.0
"""Targets with gated delta networks: a tree is one chunk of the recurrence, no state per node.

vLLM keeps 1 + N states of such a layer per request, one after each draft token. Here a request has
one. A forward pass reads it and leaves what acceptance needs of its rows (`Kept`); after the walk
`postprocess_state` moves the state along the accepted path. Prompts stay with vLLM's own kernels,
which write the state in place.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState
from vllm.v1.worker.utils import AttentionGroup

from bastion_kernels import gated_delta_commit, short_conv_commit
from vllm_bastion.attention.gdn_cpu import TreeRows, states_of
from vllm_bastion.step.target import BastionModelState


class _OneState(MambaHybridModelState):
    """vLLM's, without the count of accepted tokens by which it picks one of several states."""

    postprocess_state = DefaultModelState.postprocess_state


class HybridModelState(BastionModelState, _OneState):
    """See the module docstring. Built by the hook on ``init_model_state``."""

    def initialize_kv_cache(
        self, kv_cache_config: KVCacheConfig, block_tables: BlockTables
    ) -> None:
        super().initialize_kv_cache(kv_cache_config, block_tables)
        # name -> layer, KV-cache group
        self._recurrent: dict[str, tuple[Any, int]] = {}
        for group, spec in enumerate(kv_cache_config.kv_cache_groups):
            layers = get_layers_from_vllm_config(self.vllm_config, MambaBase, spec.layer_names)
            self._recurrent.update({name: (layer, group) for name, layer in layers.items()})

    def _is_target(self, group: AttentionGroup) -> bool:
        return group.layer_names[0] in self._recurrent or super()._is_target(group)

    def prepare_attn(
        self, input_batch: Any, cudagraph_mode: Any, block_tables: Any, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        metadata = super().prepare_attn(input_batch, cudagraph_mode, block_tables, *args, **kwargs)
        starts = input_batch.query_start_loc[: input_batch.num_reqs + 1]
        by_group: dict[int, TreeRows | None] = {}
        for name, (layer, group) in self._recurrent.items():
            layer.bastion_kept = None
            if group not in by_group:
                mine = metadata[name].spec_sequence_masks
                by_group[group] = None
                if mine is not None:
                    places = block_tables[group][: input_batch.num_reqs, 0]
                    places = torch.where(mine[: input_batch.num_reqs], places, -1)
                    by_group[group] = TreeRows(self.trees, starts, places)
            metadata[name].tree_rows = by_group[group]
        return metadata

    def postprocess_state(
        self,
        idx_mapping: torch.Tensor,
        num_sampled: torch.Tensor,
        num_computed_tokens: torch.Tensor | None = None,
    ) -> None:
        super().postprocess_state(idx_mapping, num_sampled, num_computed_tokens)
        batch = self._batch
        if batch is None:
            return
        path = self.trees.path[: batch.num_reqs]
        if not self.trees.walked:
            # no drafts at all: the root alone
            path.fill_(-1)
            path[:, 0] = 0
        for layer, _ in self._recurrent.values():
            kept = layer.bastion_kept
            if kept is None:
                continue
            layer.bastion_kept = None
            conv_state, state = states_of(layer)
            where = (kept.rows.state_rows, kept.rows.query_start_loc, batch.cu_num_logits, path)
            gated_delta_commit(kept.key, kept.updates, kept.decays, state, *where)
            short_conv_commit(kept.conv_input, conv_state, *where)
