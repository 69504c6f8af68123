# SPDX-License-Identifier: Apache-2.0
"""vLLM's DFlash drafter, proposing a tree.

``DFlashSpeculator`` runs unchanged, with its own gamma: it sees a copy of the config in which
``num_speculative_tokens`` is the checkpoint's ``block_size - 1``, whatever the node budget is. Two
things differ. ``_generate_draft``, which DFlash captures into its CUDA graph, turns the block's
logits into trees. And after a step that verified trees, the drafter's context is the accepted path
only: at most gamma + 1 rows a request, in order, so that rejected nodes cost it nothing and its
graph fits.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.utils.math_utils import next_power_of_2
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_states.interface import ModelState
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
from vllm.v1.worker.gpu.states import RequestState

from bastion_kernels import context_rows, gather_rows
from vllm_bastion.config import bastion_config, chain_view_of
from vllm_bastion.drafters.room import MOST_AT_ONCE, for_all_rows, parts, with_room
from vllm_bastion.engine.deferred import DeferredContext, may_defer
from vllm_bastion.engine.runtime import Runtime
from vllm_bastion.platform import current_host

_MAX_INPUT_BLOCK = 256  # of vLLM's `prepare_dflash_inputs`
# vLLM's `propose` skips its CUDA graph for a profiling run and has no other argument for that.
_WITHOUT_GRAPH = {"is_profile": True}


class BastionSpeculator(DFlashSpeculator):
    """Built by the hook on ``init_speculator``. D = gamma, M = rows handed to the drafter."""

    _speculator_name = "BASTION"
    vllm_config: VllmConfig
    # Whether vLLM's `propose` is to store the context's keys and values and run no block. It calls
    # the methods that ask for this without a free argument; see `_storing_context_only`.
    _context_only = False
    # Whether the drafter's blocks stay the request's while its rows wait, those of a prompt too;
    # false before `set_attn`.
    _may_defer = _may_defer_prompts = False
    # Whether `decide` was called for the current step, as it is not in vLLM's warm-up, and whether
    # it found that hidden states need only be kept.
    _has_decided = _only_keeps = False
    # Whether this kind of drafter can grow trees from the first positions of a block, and how many
    # at its end the coming draft does without.
    may_stop_early = True
    _spared = 0

    def __init__(
        self,
        runtime: Runtime,
        vllm_config: VllmConfig,
        device: torch.device,
        req_states: RequestState,
    ) -> None:
        step_rows = vllm_config.scheduler_config.max_num_batched_tokens
        super().__init__(with_room(chain_view_of(vllm_config)), device)
        self.runtime, self.trees = runtime, runtime.trees
        self._req_states = req_states
        # With async scheduling the next step is scheduled before this one's output arrives. A draft
        # must be announced a step early, or its tree meets a step without placeholders.
        self._announces_drafts = bool(vllm_config.scheduler_config.async_scheduling)
        # The runner reads this from the speculator, not from the config, to create the manager
        # that trims the scheduled placeholders to N*.
        self.enable_adaptive_verification = True
        self.use_acceptance_estimator = False
        # The batch as the drafter sees it, see `_accepted_context`.
        self._context_source = torch.zeros(step_rows, dtype=torch.int64, device=device)
        self._accepted_positions = torch.zeros_like(self._context_source)
        self._context_rejected = torch.zeros(self.max_num_reqs, dtype=torch.int32, device=device)
        self._context_layout = torch.zeros(
            2 * self.max_num_reqs + 1, dtype=torch.int32, device=device
        )
        self._context_hidden: list[torch.Tensor] = []
        # Whether the drafter combines hidden states of several layers of the target.
        self._combines_hidden = False
        # A layer of each of the drafter's KV cache groups.
        self._context_layers: list[str] = []

    # ---- buffers for more rows than a step has ------------------------------------------

    def load_draft_model(self, *args: Any, **kwargs: Any) -> nn.Module:
        """Load the drafter, and compile it for as many rows as its buffers have."""
        config = self.vllm_config
        if self.max_num_tokens > len(self._context_source):
            self.vllm_config = copy.copy(config)
            self.vllm_config.compilation_config = for_all_rows(
                config.compilation_config, len(self._context_source)
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
        spec_config = bastion_config(config)
        assert spec_config is not None
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
        self._may_defer_prompts = self._may_defer and all(may_defer(spec, True) for spec in specs)
        self.runtime.deferred = None

    def _deferred(self) -> DeferredContext | None:
        """Rows of plain steps, in the buffers that accepted paths use too; None: none may wait."""
        if self.runtime.deferred is None and self._may_defer and self._context_hidden:
            rows = min(len(self._context_source), self.max_num_tokens)
            self._deferred_slots = torch.zeros(
                len(self._context_layers), rows, dtype=torch.int64, device=self.device
            )
            self.runtime.deferred = DeferredContext(
                self._context_hidden,
                self._accepted_positions[:rows],
                self._deferred_slots,
                self.max_num_reqs,
                self._store_deferred,
            )
        return self.runtime.deferred

    def _store_deferred(self, count: int) -> None:
        hidden = [rows[:count] for rows in self._context_hidden]
        self.hidden_states[:count].copy_(
            self.model.combine_hidden_states(torch.cat(hidden, dim=-1))
            if self._combines_hidden
            else hidden[0]
        )
        self.context_positions[:count].copy_(self._accepted_positions[:count])
        self._context_slot_mappings[:, :count].copy_(self._deferred_slots[:, :count])
        self._precompute_context_kv(0, count)

    def _num_graph_context_tokens(self, num_reqs: int) -> int:
        # vLLM 0.33 also sizes a buffer by it, for all requests; no graph has so many.
        return int(super()._num_graph_context_tokens(min(num_reqs, MOST_AT_ONCE)))

    # ---- the drafter's forward and the trees --------------------------------------------

    def capture(self) -> None:
        self.trees.bind_rows()
        super().capture()

    def _generate_draft(
        self,
        num_reqs: int,
        num_tokens_padded: int,
        attn_metadata: dict[str, Any] | None,
        slot_mappings: dict[str, torch.Tensor] | None,
        num_tokens_across_dp: torch.Tensor | None,
        cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE,
    ) -> None:
        if self._context_only:
            return
        hidden_states = self._run_model(
            num_tokens_padded,
            attn_metadata,
            slot_mappings,
            num_tokens_across_dp,
            cudagraph_runtime_mode,
        )
        self._grow_trees(self._of_block(hidden_states, num_reqs), num_reqs)

    @contextmanager
    def _storing_context_only(self, only: bool = True) -> Iterator[None]:
        self._context_only = only
        try:
            yield
        finally:
            self._context_only = False

    def _of_block(self, hidden_states: torch.Tensor, num_reqs: int) -> torch.Tensor:
        """The rows that trees are grown from: one for each predicted position."""
        rows = self.sample_indices[: num_reqs * self.num_speculative_steps]
        if self._spared:
            rows = rows.view(num_reqs, -1)[:, : -self._spared].flatten()
        return hidden_states[rows]

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
            del logits  # before those of the next part exist
        depth = len(hidden_states) // num_reqs
        self.trees.grow_ranked(num_reqs, depth, self.model.draft_id_to_target_id)

    def _build_uniform_attn_metadata(self, *args: Any, **kwargs: Any) -> Any:
        # The metadata of the block, which is not run.
        return None if self._context_only else super()._build_uniform_attn_metadata(*args, **kwargs)

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
        num_reqs = input_batch.num_reqs
        runtime = self.runtime
        # vLLM asks for 0 where no request of the step can use a draft.
        skipped = num_speculative_tokens == 0
        if dummy_run or not self._has_decided:
            runtime.drafted = not skipped
        else:
            self._stop_at_the_end(input_batch, num_sampled)
            if not runtime.drafted:
                kwargs |= _WITHOUT_GRAPH  # the graph would run the block
        hidden = aux_hidden_states or [last_hidden_states]
        self._combines_hidden = bool(aux_hidden_states)
        if not self._context_hidden and not (self.trees.chains and self.trees.budget is not None):
            # In the profiling run, so that vLLM counts it before it sizes the KV cache.
            self._context_hidden = [
                torch.zeros(len(self._context_source), h.shape[1], dtype=h.dtype, device=h.device)
                for h in hidden
            ]
        tokens = self.trees.tokens[:num_reqs]
        if skipped:
            # vLLM overwrites the result with -1; `trees.tokens` must keep its tokens.
            tokens = torch.full_like(tokens, -1)
        if self._only_keeps and not dummy_run:
            self.keep(input_batch, slot_mappings, hidden)
            return tokens
        if not dummy_run and runtime.deferred is not None:
            runtime.deferred.flush()
        if dummy_run:
            self.trees.bind_rows()
        else:
            self.trees.bind_rows(input_batch.idx_mapping, num_sampled)
        if self.trees.verifying and not dummy_run:
            input_batch, hidden, num_rejected = self._accepted_context(
                input_batch, hidden, num_sampled, num_rejected
            )
            if aux_hidden_states:
                aux_hidden_states = hidden
            else:
                last_hidden_states = hidden[0]
        with self._storing_context_only(not runtime.drafted):
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
        if not dummy_run:
            self._has_decided = False
            self._step_done()
        return tokens

    def _stop_at_the_end(self, batch: InputBatch, num_sampled: torch.Tensor) -> None:
        """Draft nothing beyond the ends of all replies, where the host knows what was sampled."""
        runtime = self.runtime
        if not runtime.drafted or runtime.manager is None:
            return
        if runtime.controller is None or not runtime.controller.gates:
            return
        if current_host().runs_ahead:
            return
        slots, remaining = runtime.manager.continuing(batch, num_sampled)
        runtime.drafted = len(slots) > 0
        if runtime.drafted and runtime.reach is not None:
            self._spared = max(self._spared, runtime.reach.depth + 1 - int(remaining.max()))

    def _step_done(self) -> None:
        if self.runtime.timer is not None:
            self.runtime.timer.step_done(self.runtime.drafted, self._spared)
        self._spared = 0

    # ---- steps that draft nothing -------------------------------------------------------

    def decide(self, batch: InputBatch, num_speculative_tokens: int) -> bool:
        """Decide whether the step ends with a draft. Called before its tokens are sampled.

        Returns:
            Whether nothing is left for `propose` to do but to `keep` the step's hidden states:
            there is no draft, and no row that may be rejected. A prompt's rows are kept only if
            drafting was refused at its end: a longer prompt, or one that waits, would fill the
            buffer in the next step.
        """
        runtime, controller = self.runtime, self.runtime.controller
        self._has_decided = True
        skipped = num_speculative_tokens == 0
        runtime.drafted = not skipped
        if self.trees.budget == 0:
            runtime.drafted = runtime.drafting = False
        refused = False
        if runtime.reach is not None:
            slots = batch.idx_mapping_np
            if batch.num_draft_tokens > 0:
                deepest = self.trees.deepest(slots, self.trees.step_drafts)
                runtime.reach.observe(slots, deepest)
            self._spared = runtime.reach.depth - runtime.reach.of(slots)
        if controller is not None:
            runtime.learn()
            context = runtime.context_len
            if batch.has_prefill:  # of the next step, when the prompts are cached too
                seen = batch.num_computed_tokens_np + batch.num_scheduled_tokens
                context = float(seen.sum()) / len(seen)
            if skipped or runtime.manager is None:
                controller.price(batch.num_reqs, context, self._spared)
            else:
                decision = runtime.manager.plan(batch, context, self._spared)
                runtime.drafted = decision.drafts
                if not decision.replies_end:
                    announced, runtime.drafting = runtime.drafting, decision.drafts
                    runtime.drafted = announced if self._announces_drafts else decision.drafts
                    refused = not runtime.drafted and not runtime.backlog
        verifies = self.trees.verifying or batch.num_draft_tokens > 0
        deferred = None if runtime.drafted or verifies else self._deferred()
        self._only_keeps = deferred is not None and (
            batch.num_tokens == batch.num_reqs
            or (refused and self._may_defer_prompts and deferred.has_room(batch.num_tokens))
        )
        return self._only_keeps

    @contextmanager
    def drafting_first(self) -> Iterator[None]:
        """Within it dummy runs draft the first position only."""
        self._spared = self.num_speculative_steps - 1
        try:
            yield
        finally:
            self._spared = 0

    def keep(
        self,
        batch: InputBatch,
        slot_mappings: dict[str, torch.Tensor],
        hidden: list[torch.Tensor],
    ) -> None:
        """End a step for which `decide` returned true, without a draft.

        hidden: the target's hidden states that the drafter reads, [T, H] each.
        """
        deferred = self._deferred()
        assert deferred is not None
        slots = [slot_mappings[layer] for layer in self._context_layers]
        deferred.add(hidden, batch.positions, slots, batch.num_tokens, batch.req_ids)
        self._has_decided = self._only_keeps = False
        self._step_done()

    # ---- the drafter's context ----------------------------------------------------------

    def _accepted_context(
        self,
        batch: InputBatch,
        hidden: list[torch.Tensor],
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
    ) -> tuple[InputBatch, list[torch.Tensor], torch.Tensor]:
        """Replace each request's tree rows by its accepted path, padded to at most D + 1 rows.

        hidden: tensors [T, H]; num_sampled, num_rejected: [R]. Returns the batch, the hidden states
        [M, H] and num_rejected [R] for the drafter: vLLM drops a request's last ``num_rejected``
        rows.

        Only the device may know how many nodes were verified, so the host lays out rows by what was
        scheduled. Row i of a request is the i-th node of its path, or a row that is dropped.
        """
        num_reqs, width = batch.num_reqs, self.trees.depth + 1
        tail = np.minimum(self.trees.step_drafts + 1, width)
        # Prompt rows in front of the root; a decoding request has none.
        before = self.trees.step_base_rows - 1
        layout = np.zeros(2 * num_reqs + 1, dtype=np.int32)
        start = layout[: num_reqs + 1]
        np.cumsum(before + tail, out=start[1:])
        layout[num_reqs + 1 :] = before
        total = int(start[-1])
        on_device = async_tensor_h2d(layout, out=self._context_layout[: len(layout)])
        starts, source = on_device[: num_reqs + 1], self._context_source[:total]
        positions, rejected = self._accepted_positions[:total], self._context_rejected[:num_reqs]
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
            int((before + tail).max()),
        )
        accepted_hidden = [out[:total] for out in self._context_hidden]
        gather_rows(hidden, source, accepted_hidden)
        accepted_batch = replace(
            batch,
            num_tokens=total,
            num_tokens_after_padding=total,
            num_scheduled_tokens=(before + tail).astype(np.int32),
            positions=positions,
            query_start_loc=starts,
            query_start_loc_np=start,
        )
        return accepted_batch, accepted_hidden, rejected

    def warm_up(self) -> None:
        """Compile the kernels of the first request and of the first accepted path."""
        self._warm_up_inputs()
        one = self._context_layout[:1].zero_()
        two = torch.zeros(2, dtype=torch.int32, device=self.device)
        positions, rejected = self._accepted_positions, self._context_rejected[:1]
        context_rows(two, one, two, two, self.trees.path, positions, one, one, self._context_source,
                     positions, rejected, 1)  # fmt: skip
        rows = self._context_source[:1].fill_(-1)
        gather_rows(
            self._context_hidden, rows, [torch.empty_like(h[:1]) for h in self._context_hidden]
        )

    def _warm_up_inputs(self) -> None:
        """Compile vLLM's input kernel for every block size; it depends on the longest query."""
        none = torch.zeros(1, dtype=torch.int32, device=self.device)
        states = self._req_states
        block = next_power_of_2(1 + self.num_query_per_req)
        while block <= _MAX_INPUT_BLOCK:
            rows = min(block - self.num_query_per_req, len(self._context_source))
            if rows + self.num_query_per_req <= block // 2:
                break  # no batch has a query this long
            batch = InputBatch.make_dummy(1, rows, self.target_input_buffers)
            with self._storing_context_only():
                super().propose(
                    batch, {}, {}, self.hidden_states, None, none, none, states.last_sampled_tokens,
                    states.next_prefill_tokens, self.temperature, self.seeds, dummy_run=True,
                    **_WITHOUT_GRAPH,
                )  # fmt: skip
            block *= 2


def _all_gather(keys: torch.Tensor) -> torch.Tensor:
    # vLLM's shared memory between CPU workers takes floats only.
    return tensor_model_parallel_all_gather(keys.view(torch.float32), dim=1).view(torch.int64)
