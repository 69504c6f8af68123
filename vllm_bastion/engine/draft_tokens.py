# SPDX-License-Identifier: Apache-2.0
"""The worker's side of grammars: sends trees to the engine core and removes refused nodes.

See `vllm_bastion.engine.grammar`.
"""

from __future__ import annotations

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.utils import DraftTokensHandler
from vllm.v1.worker.gpu.states import RequestState

from vllm_bastion.engine.grammar import encode
from vllm_bastion.engine.runtime import Runtime, runtime_of


class TreeDraftTokens(DraftTokensHandler):
    """vLLM's channel for draft tokens, with each token's parent encoded into it."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device | None) -> None:
        super().__init__(device)
        self._vllm_config = vllm_config

    def set_draft_tokens(self, input_batch: InputBatch, draft_tokens: torch.Tensor) -> None:
        """draft_tokens: [R, N] int64."""
        if input_batch.has_structured_output_reqs:
            parents = runtime_of(self._vllm_config).trees.parents[input_batch.idx_mapping]
            draft_tokens = encode(draft_tokens, parents[:, : draft_tokens.shape[1]])
        super().set_draft_tokens(input_batch, draft_tokens)


def select_columns(
    runtime: Runtime, req_states: RequestState, selected: dict[str, tuple[list[int], list[int]]]
) -> None:
    """Move the columns that a grammar allows to the front of their trees.

    selected: request id -> columns, ascending, and their parents' new node numbers.
    """
    trees, slot_of = runtime.trees, req_states.req_id_to_index
    named = [(slot_of[name], *lists) for name, lists in selected.items() if name in slot_of]
    # A row for each request: request slot and number of nodes, then columns, then parents.
    plan = np.zeros((len(named), 2 * trees.num_nodes + 2), dtype=np.int64)
    columns, parents = plan[:, 2 : 2 + trees.num_nodes], plan[:, 2 + trees.num_nodes :]
    parents.fill(-1)
    for row, (slot, from_columns, new_parents) in enumerate(named):
        plan[row, :2] = slot, len(from_columns)
        columns[row, : len(from_columns)] = from_columns
        parents[row, : len(from_columns)] = new_parents
    on_device = async_tensor_h2d(plan, device=trees.device)
    slots, sizes = on_device[:, 0], on_device[:, 1]
    source = on_device[:, 2 : 2 + trees.num_nodes]
    req_states.draft_tokens[slots] = req_states.draft_tokens[slots].gather(1, source)
    trees.select_columns(slots, sizes, source, on_device[:, 2 + trees.num_nodes :])
