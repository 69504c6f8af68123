# SPDX-License-Identifier: Apache-2.0
"""Targets with gated delta layers: a tree is one chunk of the recurrence, without a state per node.

vLLM keeps 1 + N states of such a layer for a request, one after each draft token. Here a request
has one current state. A forward pass reads it and saves what the commit needs (`CommitInputs`).
After the acceptance walk `postprocess_state` moves the state along the accepted path. Prompts stay
on vLLM's own kernels, which write the state in place.

With prefix caching (vLLM's mode "align") a block's state is the one after the block's last token,
and the state after c tokens is always in the block of token c. A prompt's chunk copies it there
first and runs in place. A step with trees reads it where it is. It then commits the state at the
end of the path and, if the path crosses a block's end, also the state there, from the same rows.

A FULL graph is replayed for every step, so the buffers of a forward pass live as long as the
engine.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState
from vllm.v1.worker.utils import AttentionGroup

from bastion_kernels import LayerStates, gated_delta_commit, short_conv_commit
from vllm_bastion.attention.gated_delta import (
    CommitInputs,
    GatedDeltaTreeMetadata,
    TreeRows,
    allocate,
    states_of,
)
from vllm_bastion.engine.limits import max_verified_rows
from vllm_bastion.engine.runtime import Runtime
from vllm_bastion.engine.target import BastionModelState
from vllm_bastion.logger import init_logger
from vllm_bastion.platform import current_host

logger = init_logger(__name__)


class _OneState(MambaHybridModelState):
    """vLLM's model state without the accepted-token counts by which it picks one of N states."""

    postprocess_state = DefaultModelState.postprocess_state


class GatedDeltaModelState(BastionModelState, _OneState):
    """See the module docstring. Built by the hook on ``init_model_state``."""

    _always_binds = True

    def __init__(self, runtime: Runtime, vllm_config: VllmConfig, *args: Any) -> None:
        super().__init__(runtime, vllm_config, *args)
        self._native = current_host().run_gated_delta
        self._layers: dict[str, Any] = {}
        self._groups: dict[str, int] = {}  # KV-cache group by layer name
        # For all layers; None until the profiling run, or until the caches are bound.
        self._commit_inputs: CommitInputs | None = None
        self._commit_inputs_by_layer: dict[str, CommitInputs] = {}
        self._max_rows = max_verified_rows(vllm_config)
        self._states: tuple[LayerStates, LayerStates] | None = None
        # The step's tree rows by KV-cache group; None in a step with prompts only.
        self._rows: dict[int, TreeRows | None] = {}
        # [G, max_num_reqs] each: the states that a step reads, and writes
        self._state_rows = torch.empty(0, dtype=torch.int32, device=self.device)
        self._into_rows = self._state_rows
        # The step's block tables by KV-cache group, and tokens before the step, [R].
        self._tables: dict[int, torch.Tensor] = {}
        self._computed = self._state_rows
        self._block_size = 0

    def prepare_dummy_inputs(self, num_reqs: int, num_tokens: int) -> dict[str, Any]:
        self._allocate()  # in the profiling run, so that vLLM counts it
        return super().prepare_dummy_inputs(num_reqs, num_tokens)

    def _allocate(self) -> None:
        """Allocate the forward passes' buffers, once."""
        if self._commit_inputs is not None:
            return
        self._layers = get_layers_from_vllm_config(self.vllm_config, MambaBase)
        rows, dtype = self._max_rows, self.vllm_config.model_config.dtype
        saved = allocate(list(self._layers.values()), rows, dtype, self.device)
        self._commit_inputs = saved
        self._commit_inputs_by_layer = {
            name: saved.of_layer(index) for index, name in enumerate(self._layers)
        }
        logger.info(
            "Allocated %.1f MiB for the gated delta layers' tree rows, at most %d in a step",
            sum(x.nbytes for x in saved.tensors()) / 2**20,
            rows,
        )

    def initialize_kv_cache(
        self, kv_cache_config: KVCacheConfig, block_tables: BlockTables
    ) -> None:
        super().initialize_kv_cache(kv_cache_config, block_tables)
        # Not in `__init__`: sleep of level 2 discards what is allocated with the weights.
        self._no_state = torch.tensor(-1, dtype=torch.int32, device=self.device)
        self._depths = torch.arange(self.trees.path.shape[1], dtype=torch.int32, device=self.device)
        self._starts = torch.zeros(self.max_num_reqs + 1, dtype=torch.int32, device=self.device)
        self._allocate()
        groups = kv_cache_config.kv_cache_groups
        self._groups = {
            name: group
            for group, spec in enumerate(groups)
            for name in spec.layer_names
            if name in self._layers
        }
        self._states = None
        self._state_rows = torch.full_like(self._starts[1:], -1).repeat(len(groups), 1)
        self._into_rows = self._state_rows.clone()
        # All such layers have one block size; without prefix caching it is max_model_len.
        self._block_size = next(
            groups[group].kv_cache_spec.block_size for group in self._groups.values()
        )
        self._check_block_size()

    def _check_block_size(self) -> None:
        """Refuse trees that could cross two block ends: vLLM allocates one block per step."""
        spec_config = self.vllm_config.speculative_config
        assert spec_config is not None
        nodes = spec_config.num_speculative_tokens
        if self._align_mode and 1 + nodes > self._block_size:
            raise ValueError(
                f'"num_speculative_tokens": {nodes} is too large for prefix caching of recurrent '
                f"states in blocks of {self._block_size} tokens: lower it to "
                f"{self._block_size - 1}, raise block_size, or set enable_prefix_caching to False"
            )

    def preprocess_state(
        self,
        input_batch: Any,
        block_tables: Any,
        kv_cache_config: KVCacheConfig,
        num_computed_tokens: torch.Tensor,
    ) -> None:
        """Copy the states of prompts to the blocks where their chunks end.

        vLLM does this for decoding requests too. Their states stay until the path is known.
        """
        count = input_batch.num_reqs
        prompts = input_batch.is_prefilling_np[:count]
        if not self._align_mode or not prompts.any():
            return
        slots = input_batch.idx_mapping[:count].long()
        is_prompt = async_tensor_h2d(torch.from_numpy(prompts.copy()), device=self.device)
        source = self._column(num_computed_tokens[slots])
        end = self._column(input_batch.seq_lens[:count])
        self._mamba_src_col_gpu[slots] = source.int()
        self._mamba_state_idx_gpu[slots] = torch.where(is_prompt, end, source).int()
        assert self._mamba_ctx is not None
        self._mamba_ctx.run_fused_precopy(
            count,
            self._mamba_state_idx_gpu,
            self._mamba_src_col_gpu,
            self._mamba_src_off_gpu,  # always 0: a block has one state
            input_batch.idx_mapping,
        )

    def _column(self, tokens: torch.Tensor) -> torch.Tensor:
        """The block table's column of the state after `tokens` tokens, -1 = no state."""
        return (tokens + self._block_size - 1) // self._block_size - 1

    def _blocks(self, group: int, tokens: torch.Tensor) -> torch.Tensor:
        """The blocks of the states after `tokens` [R] tokens."""
        table = self._tables[group][: len(tokens)]
        if not self._align_mode:
            return table[:, 0]  # the request's one state
        # A dummy batch can have any number of tokens.
        columns = self._column(tokens).clamp(0, table.shape[1] - 1)
        return table.gather(1, columns.long()[:, None])[:, 0]

    def _is_target(self, group: AttentionGroup) -> bool:
        return group.layer_names[0] in self._groups or super()._is_target(group)

    def prepare_attn(
        self, input_batch: Any, cudagraph_mode: Any, block_tables: Any, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        metadata = super().prepare_attn(input_batch, cudagraph_mode, block_tables, *args, **kwargs)
        self._rows, self._tables = {}, dict(enumerate(block_tables))
        with_rows: dict[int, GatedDeltaTreeMetadata] = {}
        for name, group in self._groups.items():
            layer_metadata = metadata.get(name)
            if layer_metadata is None:
                continue  # vLLM leaves these layers out of a profiling run
            if group not in self._rows:
                # All layers of a group have the same metadata.
                rows = self._rows[group] = self._tree_rows(
                    layer_metadata, input_batch, group, self._state_rows[group]
                )
                if rows is not None:
                    with_rows[group] = GatedDeltaTreeMetadata(
                        **vars(layer_metadata), tree_rows=rows
                    )
            metadata[name] = with_rows.get(group, layer_metadata)
        return metadata

    def _tree_rows(
        self, metadata: Any, batch: Any, group: int, state_rows: torch.Tensor
    ) -> TreeRows | None:
        """The rows of decoding requests; vLLM calls them speculative, with drafts or without."""
        decode = metadata.spec_sequence_masks
        if decode is None:
            return None
        # The graph's padding included: a graph reads all of its requests.
        count = len(decode)
        state_rows = state_rows[:count]
        starts, step_rows = batch.query_start_loc[: count + 1], None
        self._computed = batch.seq_lens[:count] - starts.diff()
        blocks = self._blocks(group, self._computed)
        torch.where(decode, blocks, self._no_state, out=state_rows)
        if metadata.num_prefills:
            rows = starts.diff() * decode
            starts, step_rows = self._starts[: count + 1], metadata.spec_token_indx
            torch.cumsum(rows, 0, dtype=torch.int32, out=starts[1:])
        if int(batch.num_tokens) > self._max_rows:
            # A dummy batch is not trimmed: skip the requests that do not fit the buffers.
            fits = starts[1:] <= self._max_rows
            torch.where(fits, state_rows, self._no_state, out=state_rows)
        return TreeRows(
            self.trees, starts, state_rows, step_rows, self._commit_inputs_by_layer, self._native
        )

    def warm_up(self) -> None:
        super().warm_up()
        nothing = torch.zeros(2, dtype=torch.int32, device=self.device)
        no_rows = self._state_rows[:, :1].fill_(-1)
        self._commit(no_rows, no_rows, nothing, nothing, self.trees.path[:1])

    def _commit(self, *where: torch.Tensor) -> None:
        """Move the states of all layers along accepted paths.

        where: the arguments of `gated_delta_commit` from state_rows on.
        """
        if self._states is None:
            both = zip(*(states_of(self._layers[name]) for name in self._layers), strict=True)
            groups = [self._groups[name] for name in self._layers]
            conv_states, states = (LayerStates(by_layer, groups) for by_layer in both)
            self._states = conv_states, states
        conv_states, states = self._states
        saved = self._commit_inputs
        assert saved is not None
        gated_delta_commit(saved.key, saved.updates, saved.decays, states, *where)
        short_conv_commit(saved.conv_input, conv_states, *where)

    def postprocess_state(
        self,
        idx_mapping: torch.Tensor,
        num_sampled: torch.Tensor,
        num_computed_tokens: torch.Tensor | None = None,
    ) -> None:
        super().postprocess_state(idx_mapping, num_sampled, num_computed_tokens)
        batch, by_group = self.runtime.step.batch, self._rows
        self._rows = {}
        # All groups have the same rows.
        rows = next(iter(by_group.values()), None)
        if batch is None or rows is None:
            return
        count = batch.num_reqs
        path = self.trees.path[:count]
        if not self.runtime.step.walks:
            # The accepted path is the root.
            path.fill_(-1)
            path[:, 0] = 0
        starts, computed = rows.query_start_loc[: count + 1], self._computed[:count]
        state_rows, into_rows = self._state_rows[:, :count], self._into_rows[:, :count]
        if not self._align_mode:
            self._commit(state_rows, state_rows, starts, batch.cu_num_logits, path)
            return
        end = computed + (path >= 0).sum(1, dtype=torch.int32)
        for group in by_group:
            into_rows[group] = self._blocks(group, end)
        # The path's end first: the block's end may overwrite the state that both read.
        self._commit(state_rows, into_rows, starts, batch.cu_num_logits, path)
        boundary = end // self._block_size * self._block_size
        inside = (boundary > computed) & (boundary < end)
        for group in by_group:
            into_rows[group] = torch.where(inside, self._blocks(group, boundary), self._no_state)
        to_boundary = path.masked_fill(self._depths >= (boundary - computed)[:, None], -1)
        self._commit(state_rows, into_rows, starts, batch.cu_num_logits, to_boundary)
