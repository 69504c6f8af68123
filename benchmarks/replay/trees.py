# SPDX-License-Identifier: Apache-2.0
"""Path scores of a recorded step's tree, and which of its nodes the target accepts.

The engine's own op grows the tree. Best-first trees are nested and sorted by path score, so one
number per depth is enough: `enter[d]` is the number of nodes that must be verified to include the
target's token at depth d + 1, and n nodes accept `sum(enter <= n)` tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from bastion_kernels import expand_best_first
from benchmarks.replay.recording import Recording

NEVER = 1 << 30  # larger than any budget: the target's token is not in the tree


@dataclass(frozen=True)
class StepTree:
    """The nested best-first trees of one step: rho [N] path scores, non-increasing; enter [D]."""

    rho: NDArray[np.float64]
    enter: NDArray[np.int64]

    def accepted(self, num_nodes: int) -> int:
        """Draft tokens that a verification of the `num_nodes` best nodes accepts."""
        return int(np.count_nonzero(self.enter <= num_nodes))


def target_ranks(recording: Recording) -> NDArray[np.int64]:
    """[M, D] rank of the target's token among the candidates of each depth, -1 if it is none."""
    starts = recording.token_offsets[recording.step_requests] + recording.step_positions
    truth = recording.tokens[starts[:, None] + np.arange(recording.depth)]
    hits = recording.topk_tokens == truth[:, :, None]
    return np.where(hits.any(axis=2), hits.argmax(axis=2), -1)


def best_first(
    logprobs: NDArray[np.floating], ranks: NDArray[np.int64], max_nodes: int
) -> StepTree:
    """The `max_nodes` best nodes of one step.

    Args:
        logprobs: [D, K] log-probabilities, non-increasing over K.
        ranks: [D] rank of the target's token at each depth, -1 if it is no candidate.
    """
    depth, top_k = logprobs.shape
    candidates = torch.arange(top_k, dtype=torch.int32).expand(1, depth, -1).contiguous()
    rows = torch.from_numpy(np.ascontiguousarray(logprobs, dtype=np.float32))[None]
    tokens = torch.empty(1, max_nodes, dtype=torch.int64)
    parents, depths = torch.empty(2, 1, max_nodes, dtype=torch.int32)
    log_rho, size = torch.empty(1, max_nodes), torch.empty(1, dtype=torch.int32)
    out = tokens, parents, depths, log_rho, size
    expand_best_first(candidates, rows[:, :, None], top_k, torch.zeros(1).long(), *out)
    used = int(size)
    chosen, above = tokens[0, :used].numpy(), parents[0, :used].numpy()
    enter, node = np.full(depth, NEVER, dtype=np.int64), 0
    for d, rank in enumerate(ranks):
        found = np.flatnonzero((above == node) & (chosen == rank))
        if not len(found):
            break
        enter[d] = node = int(found[0]) + 1
    return StepTree(np.exp(log_rho[0, :used].numpy().astype(np.float64)), enter)
