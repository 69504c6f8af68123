# SPDX-License-Identifier: Apache-2.0
"""Draft trees of one request, grown by the engine's op."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bastion_kernels import expand_best_first


@dataclass(frozen=True)
class DraftTree:
    """Node j + 1 is column j; node 0 is the root, the last sampled token."""

    # [1, N], in use all of them
    tokens: Tensor
    parents: Tensor
    depths: Tensor
    log_rho: Tensor

    def paths(self) -> list[tuple[int, ...]]:
        """Token path of every node, the root's empty one first."""
        paths: list[tuple[int, ...]] = [()]
        for parent, token in zip(self.parents[0].tolist(), self.tokens[0].tolist(), strict=True):
            paths.append((*paths[parent], token))
        return paths


def grown(tokens: Tensor, logprobs: Tensor, limit: int, top_k: int | None = None) -> DraftTree:
    """The `limit` nodes of largest path score.

    Args:
        tokens: `[1, D, K]` int32, candidates of each depth, best first.
        logprobs: `[1, D, K]` fp32, or `[1, D, K, K]` given each candidate of the depth above.
        top_k: children of a node; 1 for the chain that vLLM's own drafters verify.
    """
    out = [torch.empty(1, limit, dtype=torch.int64)]
    out += [torch.empty(1, limit, dtype=torch.int32) for _ in range(2)]
    out += [torch.empty(1, limit), torch.empty(1, dtype=torch.int32)]
    rows = logprobs[:, :, None] if logprobs.ndim == 3 else logprobs
    expand_best_first(
        tokens, rows, top_k or tokens.shape[2], torch.zeros(1, dtype=torch.int64), *out
    )
    return DraftTree(*(tensor[:, : int(out[-1])] for tensor in out[:-1]))
