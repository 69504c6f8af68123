# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of the tokens on accepted paths.

vLLM takes a request's i-th token from its i-th logits row. In a tree the token comes from the i-th
node of the path, so those rows are gathered first, for the requests that asked.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import get_max_chunk_logits

from vllm_bastion.platform import current_host


class PathLogprobs:
    """Collects log-probabilities over the chunks of a step."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._dims: tuple[int, int] | None = None
        self._parts: list[LogprobsTensors] = []
        self._counts: list[np.ndarray] = []

    def begin(self, slots: np.ndarray) -> None:
        """Start a step of the requests in `slots`, [R]."""
        self._dims = self._sampler.get_logprobs_dims(slots)
        self._parts, self._counts = [], []

    @property
    def wanted(self) -> bool:
        """Whether a request of the step asked for log-probabilities."""
        return self._dims is not None

    def add(
        self,
        logits: torch.Tensor,
        cu_num_logits: torch.Tensor,
        path: torch.Tensor,
        sampled: torch.Tensor,
        slots: torch.Tensor,
        slots_np: np.ndarray,
    ) -> None:
        """Score the next R requests.

        logits: [P, V]; cu_num_logits: [R + 1] first row of each request; path: [R, L + 1] nodes,
        -1 past the end; sampled: [R, L + 1] the token drawn at each; slots, slots_np: [R].
        """
        if self._dims is None:
            return
        states, token_ids = self._sampler.sampling_states, self._sampler.logprob_token_ids_state
        asked = (states.num_logprobs[slots_np] != NO_LOGPROBS) | (
            token_ids.num_token_ids.np[slots_np] > 0
        )
        # Every request has at least one row, so no path has more nodes: one in a plain step.
        path = path[:, : 1 + len(logits) - len(path)]
        counts = np.where(asked, path.shape[1], 0)
        self._counts.append(counts)
        if not asked.any():
            return
        rows = async_tensor_h2d(np.flatnonzero(asked), device=logits.device)
        nodes = path[rows]
        source = (cu_num_logits[rows][:, None] + nodes.clamp(min=0)).flatten()
        tokens = sampled[rows, : path.shape[1]].flatten()
        # `repeat_interleave` would wait for the device.
        row_slots = slots[rows][:, None].expand_as(nodes).flatten()
        if not current_host().runs_ahead:
            # Score no rows past a path's end. Elsewhere the host would wait for the path's length.
            live = (nodes >= 0).flatten()
            source, tokens, row_slots = source[live], tokens[live], row_slots[live]
            counts[asked] = (nodes >= 0).sum(1).numpy()
        num_logprobs, max_token_ids = self._dims
        step = get_max_chunk_logits(logits.shape[1])
        for first, last in pairwise([*range(0, len(source), step), len(source)]):
            part = slice(first, last)
            self._parts.append(
                compute_topk_scores(
                    logits[source[part]],
                    num_logprobs,
                    tokens[part],
                    logprob_token_ids_state=token_ids,
                    expanded_idx_mapping=row_slots[part],
                    max_per_req_token_ids=max_token_ids,
                    logits_mode=self._sampler.logprobs_mode in ("raw_logits", "processed_logits"),
                )
            )

    def tensors(self) -> LogprobsTensors | None:
        """Log-probabilities of the whole step, requests in batch order; None if none wants them."""
        if not self._parts:
            return None
        starts = np.cumsum([0, *np.concatenate(self._counts)]).tolist()
        return LogprobsTensors.cat(self._parts, starts)
