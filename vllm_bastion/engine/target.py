# SPDX-License-Identifier: Apache-2.0
"""The target's forward pass over trees: positions by depth, the mask, the KV cache.

Rotary positions are root + depth, in a buffer of their own. ``input_batch.positions`` stays linear,
because slot mappings, the drafter's context and vLLM's bookkeeping read cache positions from it.
FULL graphs of trees begin with these positions, and those of plain steps read vLLM's.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import CUDAGraphMode, VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestState
from vllm.v1.worker.utils import AttentionGroup

from bastion_kernels import KVCaches, compact_caches
from vllm_bastion.attention.graphs import PLAIN_QUERY_LEN
from vllm_bastion.attention.kv_cache import block_layout
from vllm_bastion.config import request_budget
from vllm_bastion.engine.planning import make_step
from vllm_bastion.engine.processors import has_unknown
from vllm_bastion.engine.runtime import Runtime
from vllm_bastion.engine.sampler import TreeRejectionSampler
from vllm_bastion.step import TreeMetadata


class BastionModelState(DefaultModelState):
    """vLLM's ``DefaultModelState`` for trees. Built by the hook on ``init_model_state``."""

    # Whether other layers than attention read the request slots of every step.
    _always_binds = False
    # What vLLM runs for the current step.
    _mode = CUDAGraphMode.NONE

    def __init__(self, runtime: Runtime, vllm_config: VllmConfig, *args: Any) -> None:
        super().__init__(vllm_config, *args)
        self.runtime, self.trees = runtime, runtime.trees
        self._caches_prefixes = vllm_config.cache_config.enable_prefix_caching
        # name -> layer, KV-cache group
        self._target_layers: dict[str, tuple[Attention, int]] = {}
        self._caches: KVCaches | None = None
        self._block_tables: BlockTables | None = None
        # Under data parallelism another rank's trees decide which graph is replayed here.
        self._always_binds |= vllm_config.parallel_config.data_parallel_size > 1

    def add_request(self, req_index: int, new_req_data: NewRequestData) -> None:
        super().add_request(req_index, new_req_data)
        nodes = request_budget(new_req_data.sampling_params, self.trees.num_nodes)
        self.trees.node_limits_host[req_index] = nodes
        if self.trees.ngram is not None:
            request, begin = new_req_data.req_id, new_req_data.prompt_len
            group = self.runtime.plan.ngram_groups.get(request, 0)
            size = len(new_req_data.prefill_token_ids)
            self.trees.ngram.restart(req_index, request, size, group, begin)

    # ---- the target's forward -----------------------------------------------------------

    def prepare_inputs(
        self, input_batch: InputBatch, req_states: RequestState
    ) -> dict[str, torch.Tensor | None]:
        inputs = super().prepare_inputs(input_batch, req_states)
        eager = self._mode == CUDAGraphMode.NONE and self.runtime.step.masked
        if eager or self._mode == CUDAGraphMode.PIECEWISE:
            self._move_to_depths(inputs)
        return inputs

    def begin_graph(self, inputs: dict[str, Any]) -> None:
        """Captured in front of the target: the positions that its batch needs."""
        batch = self.runtime.step.batch
        assert batch is not None
        if self.runtime.step.masked:
            self._move_to_depths(inputs)
        elif batch.max_query_len == PLAIN_QUERY_LEN and self.rope_state is None:
            inputs["positions"] = batch.positions

    def _move_to_depths(self, inputs: dict[str, torch.Tensor | None]) -> None:
        """Give every node of the step the position of its depth."""
        batch = self.runtime.step.batch
        assert batch is not None
        by_depth = self.trees.positions_by_depth(batch.positions, batch.query_start_loc)
        if self.rope_state is None:
            inputs["positions"] = by_depth
        else:
            # After the prompt, M-RoPE's positions are linear plus an offset, in all dimensions.
            mrope = inputs["positions"]
            assert mrope is not None
            mrope.add_(by_depth).sub_(batch.positions)

    def prepare_dummy_inputs(self, num_reqs: int, num_tokens: int) -> dict[str, Any]:
        inputs = super().prepare_dummy_inputs(num_reqs, num_tokens)
        # PIECEWISE graphs capture this buffer, so `prepare_inputs` must write to it.
        inputs.setdefault("positions", self.trees.positions[:num_tokens])
        return inputs

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
        """Make the step's record, and metadata of the target's layers; the drafter has its own."""
        self._mode, full = cudagraph_mode, cudagraph_mode == CUDAGraphMode.FULL
        plain = input_batch.num_tokens == input_batch.num_reqs and not input_batch.has_prefill
        if for_capture:  # a graph of trees is captured with one row of each request, too
            plain = input_batch.max_query_len == PLAIN_QUERY_LEN
        elif plain and input_batch.max_query_len is not None:
            input_batch.max_query_len = PLAIN_QUERY_LEN  # it still counts trimmed nodes
        metadata: dict[str, Any] = {}
        # A replay reads buffers only.
        if for_capture or not full or self.vllm_config.kv_transfer_config is not None:
            ours = [list(filter(self._is_target, groups)) for groups in attn_groups]
            metadata = super().prepare_attn(
                input_batch, cudagraph_mode, block_tables, slot_mappings, ours, kv_cache_config,
                for_capture, **kwargs,
            )  # fmt: skip
        if self.runtime.profiles:  # no expert processes what vLLM marks as padding
            input_batch.is_padding[: input_batch.num_tokens] = False
        step = make_step(self.runtime, input_batch, for_trees=for_capture and not plain)
        self.runtime.step = step
        in_graph = cudagraph_mode != CUDAGraphMode.NONE and not (full and plain)
        if step.masked or in_graph or self._always_binds:
            has_trees = step.masked and input_batch.num_draft_tokens_per_req is not None
            tails = input_batch.cu_num_logits if has_trees else None
            self.trees.begin_step(input_batch.idx_mapping, tails)
        if full and not for_capture:
            return metadata  # no layer is called
        for name in self._target_layers:
            layer_metadata = metadata.get(name)
            if layer_metadata is not None:  # vLLM builds none in a profiling run
                assert isinstance(layer_metadata, TreeMetadata)
                layer_metadata.trees, layer_metadata.record = self.trees, step
        return metadata

    def dummy_inputs_embeds(self, num_tokens: int) -> torch.Tensor:
        """A timed step's tokens, for a target that takes embeddings."""
        embeddings = super().dummy_inputs_embeds(num_tokens)
        batch = self.runtime.step.batch
        if self.runtime.profiles and batch is not None:
            embeddings.copy_(self.model.embed_input_ids(batch.input_ids))
        return embeddings

    def _is_target(self, group: AttentionGroup) -> bool:
        # A group has one backend, and the drafter's layers keep vLLM's.
        return group.layer_names[0] in self._target_layers

    def remove_request(self, req_id: str) -> None:
        """The request ends, is preempted or gets a longer prompt; vLLM calls it for new ones too.

        From now on its blocks may belong to another request.
        """
        scheduled = self.runtime.scheduled
        ended = scheduled is not None and req_id in scheduled.finished_req_ids
        if self.runtime.context is not None:
            self.runtime.context.leave(req_id, self._caches_prefixes or not ended)
        if self.trees.ngram is not None:
            self.trees.ngram.leave(req_id, ended)
        super().remove_request(req_id)

    # ---- after the target's forward -----------------------------------------------------

    def custom_sampler(self, sampler: Sampler) -> tuple[Sampler, TreeRejectionSampler]:
        if has_unknown(sampler):
            # It may read any row above its own, as in a chain. vLLM builds the sampler before the
            # first forward pass.
            self.trees.use_chains()
        spec_config = self.vllm_config.speculative_config
        return sampler, TreeRejectionSampler(self.runtime, sampler, spec_config, self.device)

    def initialize_kv_cache(
        self, kv_cache_config: KVCacheConfig, block_tables: BlockTables
    ) -> None:
        super().initialize_kv_cache(kv_cache_config, block_tables)
        self._target_layers = {}
        for group, spec in enumerate(kv_cache_config.kv_cache_groups):
            layers = get_layers_from_vllm_config(self.vllm_config, Attention, spec.layer_names)
            for name, layer in layers.items():
                if getattr(layer, "is_draft_layer", False):
                    continue
                self._target_layers[name] = (layer, group)
        # Built in `warm_up`: vLLM profiles with a temporary cache, which this would keep alive.
        self._caches = None
        self._block_tables = block_tables

    def warm_up(self) -> None:
        """Bind the KV caches, and compile the ops of a step with trees."""
        no_rows = torch.zeros(2, dtype=torch.int32, device=self.device)
        path = self.trees.path[:1]
        compact_caches(self._bound_caches(), self.slot_mappings, no_rows, no_rows, path)
        # vLLM's warm-up may lack a step with a mask, or one without.
        self.trees.begin_step(self.trees.step_slots[:1].zero_(), no_rows)
        self.trees.begin_step()

    def _bound_caches(self) -> KVCaches:
        if self._caches is None:
            self._caches = self.target_caches()
        return self._caches

    @property
    def slot_mappings(self) -> torch.Tensor:
        """[G, T] cache slots of the step's rows."""
        assert self._block_tables is not None
        return self._block_tables.slot_mappings

    def target_caches(self) -> KVCaches:
        """The target's caches, which it keeps alive."""
        layers, groups = zip(*self._target_layers.values(), strict=True)
        caches = [layer.kv_cache for layer in layers]
        return KVCaches(caches, groups, [block_layout(layer) for layer in layers])

    def postprocess_state(
        self,
        idx_mapping: torch.Tensor,
        num_sampled: torch.Tensor,
        num_computed_tokens: torch.Tensor | None = None,
    ) -> None:
        """Move accepted rows: after sampling, before ``propose`` overwrites the slot mappings."""
        super().postprocess_state(idx_mapping, num_sampled, num_computed_tokens)
        runtime, batch = self.runtime, self.runtime.step.batch
        if not runtime.step.verifies or self.trees.chains or batch is None:
            return  # an accepted chain is where plain decoding would put it
        if runtime.choose_draft_graph is not None and self._mode == CUDAGraphMode.FULL:
            runtime.draft_graph = runtime.choose_draft_graph(runtime.step)
        if runtime.draft_graph is not None:
            return  # it begins with this
        compact_caches(
            self._bound_caches(),
            self.slot_mappings,
            batch.query_start_loc[: batch.num_reqs + 1],
            batch.cu_num_logits,
            self.trees.path[: batch.num_reqs],
        )
