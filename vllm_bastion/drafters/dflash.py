# SPDX-License-Identifier: Apache-2.0
"""vLLM's DFlash drafter, proposing a tree.

``DFlashSpeculator`` runs unchanged, with its own gamma: it sees a copy of the config in which
``num_speculative_tokens`` is the checkpoint's ``block_size - 1``, whatever the node budget is. Two
things differ. ``_generate_draft``, which DFlash captures into its CUDA graph, turns the block's
logits into trees. And after a step that verified trees, the drafter's context is the accepted path
only, in order: a row more than a tree is deep at most, so that rejected nodes cost it nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_states.interface import ModelState
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
from vllm.v1.worker.gpu.states import RequestState

from bastion_kernels import context_rows, gather_rows
from vllm_bastion.config import chain_view_of, settings_of
from vllm_bastion.drafters.capacity import (
    LOGITS_CHUNK_REQS,
    for_all_rows,
    parts,
    with_capacity,
    with_graphs,
)
from vllm_bastion.drafters.graphs import InputGraphs, NgramGraphs
from vllm_bastion.drafters.warm_up import warm_up
from vllm_bastion.engine.deferred import DeferredContext, may_defer
from vllm_bastion.engine.planning import decide_again
from vllm_bastion.engine.runtime import Runtime
from vllm_bastion.platform import current_host
from vllm_bastion.step import Step


class BastionSpeculator(DFlashSpeculator):
    """Built by the hook on ``init_speculator``. D = gamma, M = rows handed to the drafter."""

    _speculator_name = "BASTION"
    vllm_config: VllmConfig
    # Whether a request keeps its drafter blocks while rows wait to be stored, one of each step or
    # several; false before `set_attn`.
    _may_defer = _may_defer_several = False
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
        runtime.choose_draft_graph = self._choose_graph
        super().__init__(with_capacity(chain_view_of(vllm_config)), device)
        self.req_states = req_states
        spec_config = settings_of(vllm_config)
        if spec_config.bastion_lookup:
            self.trees.look_up(req_states.all_token_ids.gpu, req_states.total_len.gpu)
        # The runner reads this from the speculator, not from the config, to create the manager
        # that trims the scheduled placeholders to N*.
        self.enable_adaptive_verification = True
        self.use_acceptance_estimator = False
        # The batch as the drafter sees it, see `_accepted_context`.
        self.context_source = torch.zeros(step_rows, dtype=torch.int64, device=device)
        self._accepted_positions = torch.zeros_like(self.context_source)
        self._context_rejected = torch.zeros(self.max_num_reqs, dtype=torch.int32, device=device)
        self._context_layout = torch.zeros(
            2 * self.max_num_reqs + 1, dtype=torch.int32, device=device
        )
        self.context_hidden: list[torch.Tensor] = []
        # Whether the drafter combines hidden states of several layers of the target.
        self._combines_hidden = False
        # A layer of each of the drafter's KV cache groups.
        self._context_layers: list[str] = []

    # ---- buffers, larger than a step of the target needs --------------------------------

    def load_draft_model(self, *args: Any, **kwargs: Any) -> nn.Module:
        """Load the drafter, and compile it for as many rows as its buffers have."""
        config = self.vllm_config
        if self.max_num_tokens > len(self.context_source):
            self.vllm_config = copy.copy(config)
            self.vllm_config.compilation_config = for_all_rows(
                config.compilation_config, len(self.context_source)
            )
        try:
            model = super().load_draft_model(*args, **kwargs)
        finally:
            self.vllm_config = config
        reduced = model.draft_id_to_target_id
        if reduced is not None and model.lm_head.org_vocab_size != len(reduced):
            raise ValueError(
                f'drafter "{self.draft_model_config.model}" has a vocabulary of {len(reduced)} '
                "tokens and no head for them (lm_head): use a complete checkpoint"
            )
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
        specs = [group.kv_cache_spec for group in groups]
        self._may_defer = self.vllm_config.kv_transfer_config is None and all(map(may_defer, specs))
        self._may_defer_several = self._may_defer and all(may_defer(spec, True) for spec in specs)
        self.runtime.deferred = None
        rows = min(len(self.context_source), self.max_num_tokens)
        self._context_slots = torch.zeros(len(groups), rows, dtype=torch.int64, device=self.device)

    def _deferred(self) -> DeferredContext | None:
        """Rows that wait, in the buffers of accepted paths; None if no row may."""
        if self.runtime.deferred is None and self._may_defer and self.context_hidden:
            self.runtime.deferred = DeferredContext(
                self.context_hidden,
                self._accepted_positions[: self._context_slots.shape[1]],
                self._context_slots,
                self.max_num_reqs,
                self._store_deferred,
            )
        return self.runtime.deferred

    def _store_deferred(self, count: int) -> None:
        positions, slots = self._accepted_positions, list(self._context_slots)
        self._store(self.context_hidden, positions, slots, count)

    def _store(
        self,
        hidden: Sequence[torch.Tensor],
        positions: torch.Tensor,
        slots: Sequence[torch.Tensor],
        count: int,
    ) -> None:
        """Compute and store the drafter's keys and values of the first `count` rows."""
        self.hidden_states[:count].copy_(self._combined([rows[:count] for rows in hidden]))
        self.context_positions[:count].copy_(positions[:count])
        for into, group in zip(self._context_slot_mappings, slots, strict=True):
            into[:count].copy_(group[:count])
        self._precompute_context_kv(0, count)

    def _combined(self, hidden: Sequence[torch.Tensor]) -> torch.Tensor:
        if not self._combines_hidden:
            return hidden[0]
        combined: torch.Tensor = self.model.combine_hidden_states(torch.cat([*hidden], -1))
        return combined

    def take_hidden(self, hidden: Sequence[torch.Tensor]) -> None:
        """Put the context's hidden states, [M, H] each, where the drafter's graph reads them."""
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
        # Other backends plan each step on the host; and ranks replay graphs together.
        in_graph = self._inputs_in_graph and self.supports_decode_metadata_update
        if not in_graph or self.dp_size > 1 or rows > self._context_slots.shape[1]:
            mode = CUDAGraphMode.NONE
        self._input_graphs = InputGraphs(self, config, mode)

    def capture(self) -> None:
        # Captured without a request, so that the runs before write nothing.
        self.trees.bind_rows()
        self.trees.begin_step()
        super().capture()
        self._ngram_graphs.capture_all()
        graphs = self.runtime.target_graphs
        target = None if graphs is None else graphs()
        if not self.trees.chains and target is not None and target.hidden_states is not None:
            assert self._input_graphs is not None
            self._input_graphs.capture_all(target.aux_hidden_states or [target.hidden_states])

    def _choose_graph(self, step: Step) -> BatchExecutionDescriptor | None:
        return None if self._input_graphs is None else self._input_graphs.graph_of(step)

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
            self.trees.rank(logits, first, slice_.org_vocab_start_index, _all_gather)
            del logits  # before the next part's logits are computed
        depth = len(hidden_states) // num_reqs
        self.trees.grow_ranked(num_reqs, depth, self.model.draft_id_to_target_id)

    @torch.inference_mode()
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
        num_speculative_tokens: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Draft, and build each request's tree. Returns the nodes' tokens, [R, N] int64."""
        num_reqs, runtime = input_batch.num_reqs, self.runtime
        hidden = aux_hidden_states or [last_hidden_states]
        self._combines_hidden = bool(aux_hidden_states)
        if not self.context_hidden and not (self.trees.chains and self.trees.budget is not None):
            # In the profiling run, so that vLLM counts it before it sizes the KV cache.
            self.context_hidden = [
                torch.zeros(len(self.context_source), h.shape[1], dtype=h.dtype, device=h.device)
                for h in hidden
            ]
        tokens = self.trees.tokens[:num_reqs]
        if num_speculative_tokens == 0:
            # vLLM overwrites the result with -1; `trees.tokens` must keep its tokens.
            tokens = torch.full_like(tokens, -1)
        if dummy_run:
            self.trees.bind_rows()
        else:
            graph, runtime.draft_graph = runtime.draft_graph, None
            if graph is not None:
                assert self._input_graphs is not None
                if runtime.deferred is not None:
                    runtime.deferred.flush()
                self._prepare_eplb_forward(num_reqs * self.num_query_per_req)
                self._input_graphs.run_fullgraph(graph)
                self.query_cudagraph_manager.run_fullgraph(graph)
                return tokens
            manager = runtime.manager
            if runtime.step.grows or manager is None or manager.has_trees:
                self.trees.bind_rows(input_batch.idx_mapping)
            step = runtime.step = decide_again(runtime, input_batch, num_sampled, self.req_states)
            if not step.drafts:
                self._keep(step, input_batch, slot_mappings, hidden, num_sampled, num_rejected)
                if step.grows:
                    self._ngram_graphs.grow(num_reqs)
                return tokens
            if runtime.deferred is not None:
                runtime.deferred.flush()
            if step.verifies and not self.trees.chains:
                input_batch, hidden, num_rejected = self._accepted_context(
                    step, input_batch, hidden, num_sampled, num_rejected
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
            num_speculative_tokens=num_speculative_tokens,
            **kwargs,
        )
        return tokens

    # ---- steps that draft nothing -------------------------------------------------------

    def _keep(
        self,
        step: Step,
        batch: InputBatch,
        slot_mappings: dict[str, torch.Tensor],
        hidden: list[torch.Tensor],
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
    ) -> None:
        """End a step without a draft: its rows wait, or are stored.

        hidden: the target's hidden states that the drafter reads, [T, H] each.
        """
        slots = [slot_mappings[layer] for layer in self._context_layers]
        in_place = step.verifies and not self.trees.chains
        count, waiting = batch.num_tokens, self._deferred()
        if in_place:
            count = int(self._context_lens(step).sum())
        if waiting is not None and not (self._may_wait(step, batch) and waiting.make_room(count)):
            waiting.flush()
            waiting = None
        positions = batch.positions[:count]
        if in_place:
            first = 0 if waiting is None else waiting.num_rows
            into = [group[first : first + count] for group in self._context_slots]
            batch, hidden, _ = self._accepted_context(
                step, batch, hidden, num_sampled, num_rejected, first, slots, into
            )
            positions, slots = batch.positions, into
        elif step.verifies:
            positions, slots = self._accepted_chains(batch, slots, num_rejected)
        if waiting is None:
            self._store(hidden, positions, slots, count)
        else:
            rows = () if in_place else (*hidden, positions, *slots)
            waiting.add(rows, count, batch.req_ids)

    def _may_wait(self, step: Step, batch: InputBatch) -> bool:
        """Whether the rows of a step without a draft may be stored later, if there is room.

        A prompt's rows wait only if the gate does not draft at its end: otherwise the next chunk or
        prompt would fill the buffer in the next step.
        """
        if batch.num_tokens == batch.num_reqs:
            return True
        gated_off = not self.runtime.plan.prompts_wait or not batch.has_prefill
        return self._may_defer_several and gated_off

    def _accepted_chains(
        self, batch: InputBatch, slots: list[torch.Tensor], num_rejected: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Positions and cache slots, [T], of chains whose last `num_rejected` rows are dropped."""
        ends = batch.query_start_loc[1 : batch.num_reqs + 1]
        row = torch.arange(batch.num_tokens, dtype=ends.dtype, device=self.device)
        request = torch.searchsorted(ends, row, right=True)
        dropped = row >= (ends - num_rejected)[request]
        slots = [group[: len(row)].masked_fill(dropped, PAD_SLOT_ID) for group in slots]
        return batch.positions[: len(row)].masked_fill(dropped, 0), slots

    # ---- the drafter's context ----------------------------------------------------------

    def _accepted_context(
        self,
        step: Step,
        batch: InputBatch,
        hidden: list[torch.Tensor],
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        first: int = 0,
        slots: Sequence[torch.Tensor] = (),
        into: Sequence[torch.Tensor] = (),
    ) -> tuple[InputBatch, list[torch.Tensor], torch.Tensor]:
        """Replace each request's tree rows by its accepted path, padded to at most L + 1 rows.

        hidden: tensors [T, H]; num_sampled, num_rejected: [R]; first: row of the buffers that the
        path begins at; slots: [T] cache slots, whose part of the path is written to `into`, [M].
        Returns the batch, the hidden states [M, H] and num_rejected [R] for the drafter: vLLM drops
        a request's last ``num_rejected`` rows.

        Row i of a request is the i-th node of its path, or a row that is dropped.
        """
        num_reqs, lens = batch.num_reqs, self._context_lens(step)
        layout = np.zeros(2 * num_reqs + 1, dtype=np.int32)
        start = layout[: num_reqs + 1]
        np.cumsum(lens, out=start[1:])
        layout[num_reqs + 1 :] = step.base_rows - 1
        total = int(start[-1])
        on_device = async_tensor_h2d(layout, out=self._context_layout[: len(layout)])
        starts, source = on_device[: num_reqs + 1], self.context_source[:total]
        positions = self._accepted_positions[first : first + total]
        rejected = self._context_rejected[:num_reqs]
        context_rows(
            starts,
            on_device[num_reqs + 1 :],
            batch.query_start_loc[: num_reqs + 1],
            batch.cu_num_logits,
            self.trees.path,
            batch.positions,
            num_sampled,
            num_rejected,
            source,
            # Positions stay linear: after compaction node i of the path is the request's row i.
            positions,
            rejected,
            int(lens.max()),
            slots,
            into,
        )
        accepted_hidden = [out[first : first + total] for out in self.context_hidden]
        gather_rows(hidden, source, accepted_hidden)
        accepted_batch = replace(
            batch,
            num_tokens=total,
            num_tokens_after_padding=total,
            num_scheduled_tokens=lens.astype(np.int32),
            positions=positions,
            query_start_loc=starts,
            query_start_loc_np=start,
        )
        return accepted_batch, accepted_hidden, rejected

    def _context_lens(self, step: Step) -> np.ndarray:
        """[R] rows of each request in the drafter's context: before its root, and of its path.

        Only the device may know how many nodes were verified, so it is as many as were scheduled.
        """
        return step.base_rows + np.minimum(step.nodes, self.trees.depth)

    def warm_up(self) -> None:
        """Compile the kernels of the first request, accepted path and n-gram draft."""
        warm_up(self)


def _all_gather(keys: torch.Tensor) -> torch.Tensor:
    # vLLM's shared memory between CPU workers takes floats only.
    return tensor_model_parallel_all_gather(keys.view(torch.float32), dim=1).view(torch.int64)
