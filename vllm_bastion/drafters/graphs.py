# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs around the drafter's own, of launches that the host would make one by one.

They are attributes of the speculator, where vLLM finds and drops those of its memory profile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

from bastion_kernels import compact_caches, draft_inputs, gather_rows
from vllm_bastion.drafters.capacity import with_graphs
from vllm_bastion.policy.trees import Trees
from vllm_bastion.scheduler.gate import Arm
from vllm_bastion.step import Step


class NgramGraphs(CudaGraphManager):
    """Graphs that grow trees from n-gram drafts alone."""

    def __init__(
        self, trees: Trees, vllm_config: VllmConfig, device: torch.device, mode: CUDAGraphMode
    ) -> None:
        mode = CUDAGraphMode.NONE if trees.ngram is None else mode
        super().__init__(with_graphs(vllm_config, 1), device, mode, decode_query_len=1)
        self._trees = trees

    def capture_all(self) -> None:
        self.capture(
            lambda desc, warmup: lambda mode: self._trees.grow_ngram(desc.num_reqs),
            "Capturing n-gram CUDA graphs",
        )

    def grow(self, num_reqs: int) -> None:
        """Build the trees of a batch, without a graph where there is none."""
        graph = self.dispatch(num_reqs, num_reqs, 1, 0)
        if graph.cg_mode == CUDAGraphMode.FULL:
            self.run_fullgraph(graph)
        else:
            self._trees.grow_ngram(num_reqs)


class InputGraphs(CudaGraphManager):
    """Graphs that end a step of trees: all work from its accepted rows up to the next draft.

    For the arm of trees they prepare the draft, one in front of each of the drafter's graphs. For
    n-gram drafts alone they store the drafter's keys and values, and grow the trees.

    They begin with the accepted rows of the target's caches. They read what the step has left in
    fixed buffers, the hidden states in those of the target's graphs, so only a step that was a FULL
    graph can be followed by one.
    """

    def __init__(self, draft: Any, vllm_config: VllmConfig, mode: CUDAGraphMode, arm: Arm) -> None:
        """draft: the `BastionSpeculator`."""
        queries = draft.num_query_per_req
        config = with_graphs(vllm_config, queries)
        super().__init__(config, draft.device, mode, decode_query_len=queries)
        self._draft, self._arm, self._hidden = draft, arm, list[torch.Tensor]()

    def capture_all(self, hidden: Sequence[torch.Tensor]) -> None:
        """hidden: the target's hidden states that the drafter reads, as its graphs write them."""
        self._hidden = list(hidden)
        self._caches = self._draft.model_state.target_caches()
        self.capture(
            lambda desc, warmup: lambda mode: self._prepare(desc.num_reqs),
            "Capturing draft input CUDA graphs",
        )

    def graph_of(self, step: Step) -> BatchExecutionDescriptor | None:
        """The graph that ends a step; the drafter's own graph of the same key follows for trees."""
        batch = step.batch
        if step.arm != self._arm or batch is None or batch.has_prefill or not step.verifies:
            return None
        reqs, queries = batch.num_reqs, self.decode_query_len
        graph = self.dispatch(reqs, reqs * queries, queries, 0)
        return graph if graph in self.graphs else None

    def _prepare(self, num_reqs: int) -> None:
        draft, trees = self._draft, self._draft.trees
        target, own, tables = draft.target_input_buffers, draft.input_buffers, draft.block_tables
        groups, rows = draft.draft_kv_cache_group_ids, num_reqs * (trees.depth + 1)
        source = draft.context.source[:rows]
        # Without prompts all rows of a request are its bonus token and its drafts.
        starts = target.query_start_loc[: num_reqs + 1]
        slot_mappings = draft.model_state.slot_mappings
        compact_caches(self._caches, slot_mappings, starts, starts, trees.path[:num_reqs])
        draft_inputs(
            trees.step_slots,
            target.query_start_loc,
            trees.path,
            target.positions,
            draft.req_states.last_sampled_tokens,
            [tables.input_block_tables[group] for group in groups],
            [tables.block_sizes[group] for group in groups],
            source,
            draft.context_positions,
            list(draft._context_slot_mappings),
            trees.row_slots,
            own.input_ids,
            own.positions,
            [tables.slot_mappings[group] for group in groups],
            own.is_padding,
            own.query_start_loc,
            own.seq_lens,
            queries=draft.num_query_per_req,
            mask_token=draft.parallel_drafting_token_id,
            max_len=draft.max_model_len,
        )
        gathered = [out[:rows] for out in draft.context.hidden]
        gather_rows(self._hidden, source, gathered)
        draft.take_hidden(gathered)
        if self._arm == Arm.NGRAM:
            draft._prepare_graph_forward(num_reqs, None)
            trees.grow_ngram(num_reqs)
