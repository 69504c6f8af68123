# SPDX-License-Identifier: Apache-2.0
"""The worker's side of grammars: sends trees to the engine core; see `engine.grammar`."""

from __future__ import annotations

import torch
from vllm.config import VllmConfig
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.utils import DraftTokensHandler

from vllm_bastion.engine.grammar import encode
from vllm_bastion.engine.runtime import runtime_of


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
