# SPDX-License-Identifier: Apache-2.0
"""A custom logits processor, which engines load by name."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext, LogitsProcessor


class Alternate(LogitsProcessor):
    """Penalises tokens with the parity of the token two positions before.

    It reads that token from the row above, which is correct for a chain and wrong for a tree.
    """

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        self._states = req_states

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        above = ctx.input_ids.roll(1).long()
        history = self._states.all_token_ids.gpu
        committed = history[ctx.expanded_idx_mapping, (ctx.pos - 1).clamp(min=0)].long()
        before = torch.where(ctx.expanded_local_pos > 0, above, committed)
        tokens = torch.arange(logits.shape[1])
        logits -= 2.0 * (tokens % 2 == before[:, None] % 2)
        return logits
