# SPDX-License-Identifier: Apache-2.0
"""Targets with gated delta layers: a tree is one chunk of the recurrence, without a state per node.

vLLM keeps 1 + N states of such a layer for a request, one after each draft token. Here a request
has one current state. A forward pass reads it and saves what the commit needs (`CommitInputs`).
After verification `postprocess_state` moves the state along the accepted path. Prompts stay
on vLLM's own kernels, which write the state in place.

With prefix caching (vLLM's mode "align") a block's state is the one after the block's last token,
and the state after c tokens is always in the block of token c. A prompt's chunk copies it there
first and runs in place. A step with trees reads it where it is. It then commits the state at the
end of the path and, if the path crosses a block's end, also the state there, from the same rows.

vLLM's builder makes metadata for its own kernels, in launches of its own. Our rows need none of it,
so the builder is only called in steps with prompts.

A FULL graph is replayed for every step, so the buffers of a forward pass live as long as the
engine.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import CUDAGraphMode, VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState
from vllm.v1.worker.utils import AttentionGroup

from bastion_kernels import StateBlocks
from vllm_bastion.attention.gated_delta import (
    CommitInputs,
    GatedDeltaTreeMetadata,
    TreeRows,
    allocate,
)
from vllm_bastion.engine.limits import max_verified_rows
from vllm_bastion.engine.recurrent_states import RecurrentStates
from vllm_bastion.engine.runtime import Runtime
from vllm_bastion.engine.target import BastionModelState
from vllm_bastion.logger import init_logger

logger = init_logger(__name__)


class _OneState(MambaHybridModelState):
    """vLLM's model state without the accepted-token counts by which it picks one of N states."""

    postprocess_state = DefaultModelState.postprocess_state

    def prepare_attn(
        self,
        input_batch: InputBatch,
        cudagraph_mode: CUDAGraphMode,
        block_tables: tuple[torch.Tensor, ...],
        slot_mappings: torch.Tensor,
        attn_groups: list[list[AttentionGroup]],
        *args: Any,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Those counts are gathered only for groups of recurrent layers."""
        groups = [group for of_cache in attn_groups for group in of_cache]
        recurrent = any(isinstance(group.kv_cache_spec, MambaSpec) for group in groups)
        prepare = (MambaHybridModelState if recurrent else DefaultModelState).prepare_attn
        batch = (self, input_batch, cudagraph_mode, block_tables, slot_mappings, attn_groups)
        metadata: dict[str, Any] = prepare(*batch, *args, **kwargs)
        return metadata


class GatedDeltaModelState(BastionModelState, _OneState):
    """See the module docstring. Built by the hook on ``init_model_state``."""

    _always_binds = True

    def __init__(self, runtime: Runtime, vllm_config: VllmConfig, *args: Any) -> None:
        super().__init__(runtime, vllm_config, *args)
        self._layers: dict[str, Any] = {}
        self._groups: dict[str, int] = {}  # group of such layers, by layer name
        # For all layers; None until the profiling run, or until the caches are bound.
        self._commit_inputs: CommitInputs | None = None
        self._commit_inputs_by_layer: dict[str, CommitInputs] = {}
        self._max_rows = max_verified_rows(vllm_config)
        self._states: RecurrentStates | None = None  # of the latest KV cache
        # Whether the step has tree rows.
        self._has_rows = False
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
            sum(x.nbytes for x in saved) / 2**20,
            rows,
        )

    def initialize_kv_cache(
        self, kv_cache_config: KVCacheConfig, block_tables: BlockTables
    ) -> None:
        super().initialize_kv_cache(kv_cache_config, block_tables)
        self._allocate()
        groups = kv_cache_config.kv_cache_groups
        held: list[int] = []  # groups of such layers
        self._groups = {}
        for index, group in enumerate(groups):
            names = [name for name in group.layer_names if name in self._layers]
            if names:
                self._groups.update(dict.fromkeys(names, len(held)))
                held.append(index)
        # All such layers have one block size; without prefix caching it is max_model_len.
        self._block_size = groups[held[0]].kv_cache_spec.block_size
        self._check_block_size()
        blocks = StateBlocks(
            [block_tables.input_block_tables[index] for index in held],
            self._block_size if self._align_mode else 0,
        )
        # Not in `__init__`: sleep of level 2 discards what is allocated with the weights.
        root_only = torch.full_like(self.trees.path, -1)
        root_only[:, 0] = 0
        assert self._commit_inputs is not None
        self._states = RecurrentStates(
            self._layers, self._groups, blocks, self._commit_inputs, self._max_rows, root_only
        )

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
        assert self._states is not None
        column_after = self._states.blocks.column_after
        source = column_after(num_computed_tokens[slots])
        end = column_after(input_batch.seq_lens[:count])
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

    def _is_target(self, group: AttentionGroup) -> bool:
        return group.layer_names[0] in self._groups or super()._is_target(group)

    def prepare_attn(
        self,
        input_batch: InputBatch,
        cudagraph_mode: CUDAGraphMode,
        block_tables: tuple[torch.Tensor, ...],
        slot_mappings: torch.Tensor,
        attn_groups: list[list[AttentionGroup]],
        kv_cache_config: KVCacheConfig,
        for_capture: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        groups = [group for of_cache in attn_groups for group in of_cache]
        recurrent = any(group.layer_names[0] in self._groups for group in groups)
        # vLLM captures decoding requests only.
        rows_only = recurrent and (for_capture or self._has_rows_only(input_batch))
        if rows_only:
            attn_groups = [
                [group for group in of_cache if group.layer_names[0] not in self._groups]
                for of_cache in attn_groups
            ]
        metadata = super().prepare_attn(
            input_batch, cudagraph_mode, block_tables, slot_mappings, attn_groups, kv_cache_config,
            for_capture, **kwargs,
        )  # fmt: skip
        # The graph's padding included: a graph reads all of its requests.
        padded = cudagraph_mode == CUDAGraphMode.FULL
        reqs = input_batch.num_reqs_after_padding if padded else input_batch.num_reqs
        decodes, by_group = None, []
        if rows_only:
            rows = input_batch.num_tokens_after_padding if padded else input_batch.num_tokens
            by_group = [_metadata(reqs, rows)] * (1 + max(self._groups.values()))
        elif recurrent:
            # All layers of a group have the same metadata.
            by_group = list({group: metadata[n] for n, group in self._groups.items()}.values())
            decodes = by_group[0].spec_sequence_masks
        self._has_rows = rows_only or decodes is not None
        if self._has_rows:
            self._add_rows(metadata, input_batch, by_group, reqs, decodes)
        return metadata

    def _has_rows_only(self, batch: InputBatch) -> bool:
        """Whether all requests decode; see vLLM's ``MambaHybridModelState.prepare_attn``."""
        spec_config = self.vllm_config.speculative_config
        assert spec_config is not None
        most = 1 + spec_config.num_speculative_tokens
        return not batch.has_prefill and bool((batch.num_scheduled_tokens <= most).all())

    def _add_rows(
        self,
        metadata: dict[str, Any],
        batch: InputBatch,
        by_group: list[GDNAttentionMetadata],
        num_reqs: int,
        decodes: torch.Tensor | None,
    ) -> None:
        """Find the tree rows, those of decoding requests, and add them to the layers' metadata.

        decodes: [num_reqs] bool, which requests decode; vLLM calls them speculative, with drafts or
        without. None: all.
        """
        states = self._states
        assert states is not None
        states.find(batch.query_start_loc[: num_reqs + 1], batch.seq_lens[:num_reqs], decodes)
        with_rows = []
        for state_rows, of_group in zip(states.rows, by_group, strict=True):
            tree_rows = TreeRows(
                self.trees,
                states.starts[: num_reqs + 1],
                state_rows[:num_reqs],
                of_group.spec_token_indx if of_group.num_prefills else None,
                self._commit_inputs_by_layer,
            )
            with_rows.append(GatedDeltaTreeMetadata(**vars(of_group), tree_rows=tree_rows))
        for name, group in self._groups.items():
            metadata[name] = with_rows[group]

    def warm_up(self) -> None:
        super().warm_up()
        assert self._states is not None
        self._states.warm_up()

    def postprocess_state(
        self,
        idx_mapping: torch.Tensor,
        num_sampled: torch.Tensor,
        num_computed_tokens: torch.Tensor | None = None,
    ) -> None:
        super().postprocess_state(idx_mapping, num_sampled, num_computed_tokens)
        batch, has_rows = self.runtime.step.batch, self._has_rows
        self._has_rows = False
        if batch is None or not has_rows:
            return
        assert self._states is not None
        path = self.trees.path if self.runtime.step.verifies else None
        self._states.commit(batch.num_reqs, batch.cu_num_logits, path)


def _metadata(num_reqs: int, num_rows: int) -> GDNAttentionMetadata:
    """What vLLM's layer reads in a step of tree rows."""
    return GDNAttentionMetadata(
        num_prefills=0,
        num_prefill_tokens=0,
        num_decodes=0,
        num_decode_tokens=0,
        num_spec_decodes=num_reqs,
        num_spec_decode_tokens=num_rows,
        num_actual_tokens=num_rows,
    )
