# SPDX-License-Identifier: Apache-2.0
"""Targets with gated delta networks: a tree is one chunk of the recurrence, no state per node.

vLLM keeps 1 + N states of such a layer per request, one after each draft token. Here a request has
one. A forward pass reads it and leaves what acceptance needs of its rows (`Kept`); after the walk
`postprocess_state` moves the state along the accepted path. Prompts stay with vLLM's own kernels,
which write the state in place.

Whatever a forward pass reads or leaves lies in buffers as old as the engine, for FULL graphs.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState
from vllm.v1.worker.utils import AttentionGroup

from bastion_kernels import gated_delta_commit, short_conv_commit
from vllm_bastion.attention.gdn import Kept, TreeRows, states_of
from vllm_bastion.logger import init_logger
from vllm_bastion.step.runtime import Runtime
from vllm_bastion.step.target import BastionModelState

logger = init_logger(__name__)


class _OneState(MambaHybridModelState):
    """vLLM's, without the count of accepted tokens by which it picks one of several states."""

    postprocess_state = DefaultModelState.postprocess_state


class HybridModelState(BastionModelState, _OneState):
    """See the module docstring. Built by the hook on ``init_model_state``."""

    def __init__(self, runtime: Runtime, vllm_config: VllmConfig, *args: Any) -> None:
        super().__init__(runtime, vllm_config, *args)
        # name -> layer, KV-cache group
        self._recurrent: dict[str, tuple[Any, int]] = {}
        # of the step, by KV-cache group: rows that are ours, None = prompts alone
        self._rows: dict[int, TreeRows | None] = {}
        self._state_rows: list[torch.Tensor] = []  # by KV-cache group, [max_num_reqs] int32
        self._no_state = torch.tensor(-1, dtype=torch.int32, device=self.device)
        self._starts = torch.zeros(self.max_num_reqs + 1, dtype=torch.int32, device=self.device)

    def prepare_dummy_inputs(self, num_reqs: int, num_tokens: int) -> dict[str, Any]:
        self._keep()  # in the profiling run, so that vLLM counts it
        return super().prepare_dummy_inputs(num_reqs, num_tokens)

    def _keep(self) -> None:
        """Allocate once what the forward passes leave."""
        layers = get_layers_from_vllm_config(self.vllm_config, MambaBase).values()
        if all(hasattr(layer, "bastion_kept") for layer in layers):
            return
        scheduler, config = self.vllm_config.scheduler_config, self.vllm_config.speculative_config
        rows = min(
            scheduler.max_num_batched_tokens,
            scheduler.max_num_seqs * (1 + config.num_speculative_tokens),
        )
        dtype = self.vllm_config.model_config.dtype
        for layer in layers:
            layer.bastion_kept = Kept(layer, rows, dtype, self.device)
        logger.info(
            "Recurrent layers keep %.1f MiB of a step of up to %d draft rows",
            sum(layer.bastion_kept.nbytes for layer in layers) / 2**20,
            rows,
        )

    def initialize_kv_cache(
        self, kv_cache_config: KVCacheConfig, block_tables: BlockTables
    ) -> None:
        super().initialize_kv_cache(kv_cache_config, block_tables)
        self._keep()
        self._recurrent, self._state_rows = {}, []
        for group, spec in enumerate(kv_cache_config.kv_cache_groups):
            layers = get_layers_from_vllm_config(self.vllm_config, MambaBase, spec.layer_names)
            self._recurrent.update({name: (layer, group) for name, layer in layers.items()})
            self._state_rows.append(torch.full_like(self._starts[1:], -1))

    def _is_target(self, group: AttentionGroup) -> bool:
        return group.layer_names[0] in self._recurrent or super()._is_target(group)

    def prepare_attn(
        self, input_batch: Any, cudagraph_mode: Any, block_tables: Any, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        metadata = super().prepare_attn(input_batch, cudagraph_mode, block_tables, *args, **kwargs)
        self._rows = {}
        for name, (_, group) in self._recurrent.items():
            of_layer = metadata.get(name)
            if of_layer is None:
                continue  # vLLM leaves these layers out of a profiling run
            if group not in self._rows:
                self._rows[group] = self._tree_rows(
                    of_layer, input_batch, block_tables[group], self._state_rows[group]
                )
            of_layer.tree_rows = self._rows[group]
        return metadata

    def _tree_rows(
        self, metadata: Any, batch: Any, block_table: torch.Tensor, state_rows: torch.Tensor
    ) -> TreeRows | None:
        """The rows of requests that decode; vLLM calls them speculative, drafts or not."""
        decode = metadata.spec_sequence_masks
        if decode is None:
            return None
        # with a graph's padding: it reads all of its requests
        count = len(decode)
        state_rows = state_rows[:count]
        torch.where(decode, block_table[:count, 0], self._no_state, out=state_rows)
        starts, places = batch.query_start_loc[: count + 1], None
        if metadata.num_prefills:
            rows = starts.diff() * decode
            starts, places = self._starts[: count + 1], metadata.spec_token_indx
            torch.cumsum(rows, 0, dtype=torch.int32, out=starts[1:])
        return TreeRows(self.trees, starts, state_rows, places)

    def warm_up(self) -> None:
        super().warm_up()
        nothing = torch.zeros(2, dtype=torch.int32, device=self.device)
        nobody = torch.full_like(nothing[:1], -1)
        for layer, _ in self._recurrent.values():
            _commit(layer, nobody, nothing, nothing, self.trees.path[:1])

    def postprocess_state(
        self,
        idx_mapping: torch.Tensor,
        num_sampled: torch.Tensor,
        num_computed_tokens: torch.Tensor | None = None,
    ) -> None:
        super().postprocess_state(idx_mapping, num_sampled, num_computed_tokens)
        batch, by_group = self._batch, self._rows
        self._rows = {}
        if batch is None or not any(by_group.values()):
            return
        count = batch.num_reqs
        path = self.trees.path[:count]
        if not self.trees.walked:
            # no drafts at all: the root alone
            path.fill_(-1)
            path[:, 0] = 0
        for layer, group in self._recurrent.values():
            rows = by_group[group]
            if rows is None:
                continue
            starts = rows.query_start_loc[: count + 1]
            _commit(layer, rows.state_rows[:count], starts, batch.cu_num_logits, path)


def _commit(layer: Any, *where: torch.Tensor) -> None:
    """Move a layer's states; `where` as of `gated_delta_commit`, from state_rows on."""
    kept, (conv_state, state) = layer.bastion_kept, states_of(layer)
    gated_delta_commit(kept.key, kept.updates, kept.decays, state, *where)
    short_conv_commit(kept.conv_input, conv_state, *where)
