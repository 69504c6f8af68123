# SPDX-License-Identifier: Apache-2.0
"""A grammar's bitmask on the device, for a part of a step's rows at a time.

vLLM allocates a row of V / 8 bytes for every possible logits row of every request, whether or not
any request has a grammar. Here a buffer of `limits.max_bitmask_rows` rows is reused for one part of
a step after the other.
"""

from __future__ import annotations

import numpy as np
import torch
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker

from vllm_bastion.versions import capabilities


class SharedBitmask(StructuredOutputsWorker):
    """Built by the hook on ``StructuredOutputsWorker``."""

    def apply_grammar_bitmask(
        self,
        logits: torch.Tensor,
        input_batch: InputBatch,
        grammar_req_ids: list[str],
        grammar_bitmask: np.ndarray,
    ) -> None:
        room = len(self.grammar_bitmask)
        if len(grammar_bitmask) <= room:
            super().apply_grammar_bitmask(logits, input_batch, grammar_req_ids, grammar_bitmask)
            return
        ends = np.cumsum(self._rows(input_batch, grammar_req_ids))
        first, above = 0, 0
        while first < len(ends):
            last = int(np.searchsorted(ends, above + room, side="right"))
            end = int(ends[last - 1])
            # vLLM's copy waits until the device has used the previous rows.
            super().apply_grammar_bitmask(
                logits, input_batch, grammar_req_ids[first:last], grammar_bitmask[above:end]
            )
            first, above = last, end

    def _rows(self, batch: InputBatch, grammar_req_ids: list[str]) -> list[int]:
        """Bitmask rows of each request."""
        if capabilities().pads_grammar_rows:
            return [self.mask_stride] * len(grammar_req_ids)
        drafts, roots = batch.num_draft_tokens_per_req, self.num_bonus_tokens
        counts = np.diff(batch.cu_num_logits_np) if drafts is None else drafts + roots
        row = {name: int(count) for name, count in zip(batch.req_ids, counts, strict=True)}
        return [row[name] for name in grammar_req_ids]
