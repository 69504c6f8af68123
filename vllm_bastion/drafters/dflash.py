# SPDX-License-Identifier: Apache-2.0
"""vLLM's DFlash drafter, proposing a tree.

``DFlashSpeculator`` sees a copy of the config in which ``num_speculative_tokens`` is the
checkpoint's gamma, not the node budget. Two things differ. ``_generate_draft``, which DFlash
captures into its CUDA graph, turns the block's logits into trees. And after a step that verified
trees, the drafter's context is the accepted path, see `engine.context`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.utils.math_utils import next_power_of_2
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_states.interface import ModelState
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
from vllm.v1.worker.gpu.states import RequestState

from vllm_bastion.config import chain_view_of, settings_of
from vllm_bastion.drafters.capacity import (
    LOGITS_CHUNK_REQS,
    for_all_rows,
    parts,
    with_capacity,
    with_graphs,
)
from vllm_bastion.drafters.graphs import InputGraphs, NgramGraphs
from vllm_bastion.engine.context import DraftContext
from vllm_bastion.engine.planning import decide_again
from vllm_bastion.engine.runtime import Runtime
from vllm_bastion.platform import current_host
from vllm_bastion.scheduler.gate import Arm
from vllm_bastion.step import Step

_MAX_INPUT_BLOCK = 256  # of vLLM's `prepare_dflash_inputs`


class BastionSpeculator(DFlashSpeculator):
    """Built by the hook on ``init_speculator``. D = gamma, P = rows handed to the drafter."""

    _speculator_name = "BASTION"
    vllm_config: VllmConfig
    # Whether a graph can prepare all that a draft reads.
    _inputs_in_graph = True

    def __init__(
        self,
        runtime: Runtime,
        vllm_config: VllmConfig,
        device: torch.device,
        req_states: RequestState,
    ) -> None:
        step_rows = vllm_config.scheduler_config.max_num_batched_tokens
        # vLLM 0.33 asks for `_num_graph_context_tokens` while it is being built.
        self.runtime, self.trees = runtime, runtime.trees
        # vLLM drops the graphs of its memory profile, so nothing else may hold them.
        self._input_graphs: InputGraphs | None = None
        self._ngram_input_graphs: InputGraphs | None = None
        runtime.choose_draft_graph = self._choose_graph
        super().__init__(with_capacity(chain_view_of(vllm_config)), device)
        self.req_states = req_states
        spec_config = settings_of(vllm_config)
        if spec_config.bastion_lookup:
            history, lengths = req_states.all_token_ids.gpu, req_states.total_len.gpu
            self.trees.look_up(history, lengths, spec_config.bastion_ngram_cache)
        # The runner reads this from the speculator, not from the config, to create the manager
        # that trims the scheduled placeholders to N*.
        self.enable_adaptive_verification = True
        self.use_acceptance_estimator = False
        self.context = DraftContext(self.trees, step_rows, self._store)
        runtime.context = self.context
        # Whether the drafter combines hidden states of several layers of the target.
        self._combines_hidden = False
        # A layer of each of the drafter's KV cache groups.
        self._context_layers: list[str] = []

    # ---- buffers, larger than a step of the target needs --------------------------------

    def load_draft_model(self, *args: Any, **kwargs: Any) -> nn.Module:
        """Load the drafter, and compile it for as many rows as its buffers have."""
        config = self.vllm_config
        step_rows = len(self.context.source)
        if self.max_num_tokens > step_rows:
            self.vllm_config = copy.copy(config)
            self.vllm_config.compilation_config = for_all_rows(config.compilation_config, step_rows)
        try:
            model = super().load_draft_model(*args, **kwargs)
        finally:
            self.vllm_config = config
        spec_config = settings_of(config)
        current_host().prepare_drafter(model, spec_config.bastion_drafter_weights)
        return model

    def set_attn(
        self,
        model_state: ModelState,
        kv_cache_config: KVCacheConfig,
        block_tables: BlockTables,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if block_tables.slot_mappings.shape[1] < self.max_num_tokens:
            # vLLM's drafter overwrites the target's slot mappings. They are too short for ours.
            block_tables = copy.copy(block_tables)
            groups = block_tables.slot_mappings.shape[0]
            block_tables.slot_mappings = block_tables.slot_mappings.new_zeros(
                groups, self.max_num_tokens
            )
        super().set_attn(model_state, kv_cache_config, block_tables, *args, **kwargs)
        groups = [kv_cache_config.kv_cache_groups[gid] for gid in self.draft_kv_cache_group_ids]
        self._context_layers = [group.layer_names[0] for group in groups]
        # A KV connector may read the drafter's blocks at the end of any step.
        may_defer = self.vllm_config.kv_transfer_config is None
        self.context.bind([group.kv_cache_spec for group in groups], may_defer=may_defer)

    def _store(
        self,
        hidden: Sequence[torch.Tensor],
        positions: torch.Tensor,
        slots: Sequence[torch.Tensor],
    ) -> None:
        """Compute and store the drafter's keys and values, see `engine.context.Store`."""
        count = len(positions)
        self.hidden_states[:count].copy_(self._combined([rows[:count] for rows in hidden]))
        self.context_positions[:count].copy_(positions)
        for into, group in zip(self._context_slot_mappings, slots, strict=True):
            into[:count].copy_(group[:count])
        self._precompute_context_kv(0, count)

    def _combined(self, hidden: Sequence[torch.Tensor]) -> torch.Tensor:
        if not self._combines_hidden:
            return hidden[0]
        combined: torch.Tensor = self.model.combine_hidden_states(torch.cat([*hidden], -1))
        return combined

    def take_hidden(self, hidden: Sequence[torch.Tensor]) -> None:
        """Put the context's hidden states, [P, H] each, where the drafter's graph reads them."""
        staging = getattr(self, "_aux_staging", None)  # vLLM 0.33 combines them in its graph
        if staging is not None:
            torch.cat([*hidden], -1, out=staging[: len(hidden[0])])
        else:
            self.hidden_states[: len(hidden[0])].copy_(self._combined(hidden))

    def _num_graph_context_tokens(self, num_reqs: int) -> int:
        """Rows whose keys and values the drafter's graph stores: a whole path of each request.

        Further rows, those of prompts, are stored outside the graph.
        """
        # vLLM 0.33 also sizes a buffer by it, for all requests; no graph has as many.
        rows = min(num_reqs, LOGITS_CHUNK_REQS) * (self.trees.depth + 1)
        return min(rows, int(self.max_num_tokens))

    # ---- the drafter's forward and the trees --------------------------------------------

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        config = self.vllm_config
        self.vllm_config = with_graphs(config, self.num_query_per_req)
        try:
            super().init_cudagraph_manager(cudagraph_mode)
        finally:
            self.vllm_config = config
        assert self.query_cudagraph_manager is not None
        mode = self.query_cudagraph_manager.cudagraph_mode
        self._ngram_graphs = NgramGraphs(self.trees, config, self.device, mode)
        rows = min(self.max_num_reqs, LOGITS_CHUNK_REQS) * (self.trees.depth + 1)
        # Other backends plan each step on the host, and data-parallel ranks replay graphs together.
        in_graph = self._inputs_in_graph and self.supports_decode_metadata_update
        if not in_graph or self.dp_size > 1 or rows > len(self.context.source):
            mode = CUDAGraphMode.NONE
        self._input_graphs = InputGraphs(self, config, mode, Arm.TREE)
        mode = CUDAGraphMode.NONE if self.trees.ngram is None else mode
        self._ngram_input_graphs = InputGraphs(self, config, mode, Arm.NGRAM)

    def capture(self) -> None:
        # Captured with no request bound, so that the warm-up runs write no tree.
        self.trees.bind_rows()
        self.trees.begin_step()
        super().capture()
        self._ngram_graphs.capture_all()
        graphs = self.runtime.target_graphs
        target = None if graphs is None else graphs()
        if not self.trees.chains and target is not None and target.hidden_states is not None:
            for own in (self._input_graphs, self._ngram_input_graphs):
                assert own is not None
                own.capture_all(target.aux_hidden_states or [target.hidden_states])

    def _choose_graph(self, step: Step) -> BatchExecutionDescriptor | None:
        graphs = self._input_graphs if step.drafts else self._ngram_input_graphs
        return None if graphs is None else graphs.graph_of(step)

    def _generate_draft(
        self,
        num_reqs: int,
        num_tokens_padded: int,
        attn_metadata: dict[str, Any] | None,
        slot_mappings: dict[str, torch.Tensor] | None,
        num_tokens_across_dp: torch.Tensor | None,
        cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE,
    ) -> None:
        hidden_states = self._run_model(
            num_tokens_padded,
            attn_metadata,
            slot_mappings,
            num_tokens_across_dp,
            cudagraph_runtime_mode,
        )
        self._grow_trees(self._of_block(hidden_states, num_reqs), num_reqs)

    def _of_block(self, hidden_states: torch.Tensor, num_reqs: int) -> torch.Tensor:
        """The rows that trees are grown from: one for each predicted position."""
        queries, depth = self.num_query_per_req, self.num_speculative_steps
        block = hidden_states[: num_reqs * queries].unflatten(0, (num_reqs, queries))
        return block[:, queries - depth :].flatten(0, 1)

    def _grow_trees(self, hidden_states: torch.Tensor, num_reqs: int) -> None:
        """Build the trees of a batch from the hidden states of `_of_block`.

        A drafter with a reduced vocabulary has logits for its own token ids.
        """
        head, process = self.model.lm_head, self.model.logits_processor
        for first, rows in parts(hidden_states, num_reqs):
            if head.tp_size == 1:
                self.trees.rank(process(head, rows), first)
                continue
            # Gather every rank's best tokens instead of all logits. Slices are padded to one size.
            logits = process(head, rows, skip_gather=True)
            slice_ = head.shard_indices
            logits = logits[:, : slice_.num_org_elements]
            self.trees.rank(
                logits, first, slice_.org_vocab_start_index,
                partial(tensor_model_parallel_all_gather, dim=1),
            )  # fmt: skip
            del logits  # before the next part's logits are computed
        depth = len(hidden_states) // num_reqs
        self.trees.grow_ranked(num_reqs, depth, self.model.draft_id_to_target_id)

    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: dict[str, Any],
        slot_mappings: dict[str, torch.Tensor],
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        *args: Any,
        dummy_run: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Draft, and build each request's tree. Returns the nodes' tokens, [R, N] int64."""
        num_reqs, runtime, context = input_batch.num_reqs, self.runtime, self.context
        hidden = aux_hidden_states or [last_hidden_states]
        self._combines_hidden = bool(aux_hidden_states)
        context.allocate(hidden)
        tokens = self.trees.tokens[:num_reqs]
        if dummy_run:
            self.trees.bind_rows()
        else:
            if self.trees.ngram is not None:
                self.trees.ngram.add_prompts()
            step, graph, runtime.draft_graph = runtime.step, runtime.draft_graph, None
            if graph is not None:
                context.flush()
                graphs = self._input_graphs if step.drafts else self._ngram_input_graphs
                assert graphs is not None
                graphs.run_fullgraph(graph)
                if step.drafts:
                    self._prepare_eplb_forward(num_reqs * self.num_query_per_req)
                    self.query_cudagraph_manager.run_fullgraph(graph)
                return tokens
            if step.grows:
                self.trees.bind_rows(input_batch.idx_mapping)
                step = runtime.step = decide_again(
                    runtime, input_batch, num_sampled, self.req_states
                )
            counts = num_sampled, num_rejected
            if not step.drafts:
                slots = [slot_mappings[layer] for layer in self._context_layers]
                prompts_wait = runtime.plan.prompts_wait
                context.keep(step, input_batch, hidden, slots, *counts, prompts_wait=prompts_wait)
                if step.grows:
                    self._ngram_graphs.grow(num_reqs)
                return tokens
            context.flush()
            if step.verifies and not self.trees.chains:
                input_batch, hidden, num_rejected = context.accepted(
                    step, input_batch, hidden, *counts
                )
                if aux_hidden_states:
                    aux_hidden_states = hidden
                else:
                    last_hidden_states = hidden[0]
        super().propose(
            input_batch,
            attn_metadata,
            slot_mappings,
            last_hidden_states,
            aux_hidden_states,
            num_sampled,
            num_rejected,
            *args,
            dummy_run=dummy_run,
            **kwargs,
        )
        return tokens

    def end_plain_step(self, state: Any) -> None:
        """In place of `propose` if the step verified nothing; state: vLLM's ExecuteModelState."""
        if self.trees.ngram is not None:
            self.trees.ngram.add_prompts()
        slots = [state.slot_mappings_by_layer[layer] for layer in self._context_layers]
        step, prompts_wait = self.runtime.step, self.runtime.plan.prompts_wait
        batch, hidden = state.input_batch, state.aux_hidden_states
        self.context.keep(step, batch, hidden, slots, prompts_wait=prompts_wait)

    def warm_up(self) -> None:
        """Compile the kernels of the first request, accepted path and n-gram draft.

        vLLM's input kernel is compiled for every block size, which depends on the longest query.
        """
        none = torch.zeros(1, dtype=torch.int32, device=self.device)
        states, queries = self.req_states, self.num_query_per_req
        block = next_power_of_2(1 + queries)
        while block <= _MAX_INPUT_BLOCK:
            rows = min(block - queries, len(self.context.source))
            if rows + queries <= block // 2:
                break  # no batch has a query this long
            batch = InputBatch.make_dummy(1, rows, self.target_input_buffers)
            super().propose(
                batch, {}, {}, self.hidden_states, None, none, none, states.last_sampled_tokens,
                states.next_prefill_tokens, self.temperature, self.seeds, dummy_run=True,
                is_profile=True,
            )  # fmt: skip
            block *= 2
        if self.trees.ngram is not None:
            self.trees.bind_rows()
            self.trees.grow_ngram(1)
            self.trees.ngram.restart(0, "", 1)
            self.trees.ngram.add_prompts()
            self.trees.ngram.leave("", False)
        self.context.warm_up()
