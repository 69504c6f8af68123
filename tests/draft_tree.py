# SPDX-License-Identifier: Apache-2.0
"""Draft trees: their invariants, and two ways to build them by the engine's op.

A node is a prefix x_1 .. x_d of candidate tokens with path score rho = prod q_i(x_i), the drafter's
probability of drawing that prefix (paper, section 3.1). If the drafter verified itself, a tree
would commit as many tokens as it has nodes on the drawn path (Lemma 1), in expectation

    A-hat(T) = 1 + sum of rho over the draft nodes of T      (path-sum surrogate; 1 is the root)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bastion_kernels import expand_best_first

_UNUSED = {"tokens": 0, "parents": -1, "depths": 0, "log_rho": float("-inf")}


@dataclass(frozen=True)
class DraftTree:
    """The draft trees of R requests, with N columns each and one node per column.

    Column j is node j + 1; node 0 is the root, the last sampled token, and has no column. In every
    row, as `validate` checks:

    - the first `num_nodes` columns are in use; the others hold token 0, parent -1, depth 0,
      log rho -inf;
    - a parent's number is at most its child's column, so parents come first;
    - a node is one deeper than its parent, and siblings carry different tokens;
    - log rho does not increase from column to column, hence not from parent to child.
    """

    # [R, N] int64, token of each node
    tokens: Tensor
    # [R, N] int32, number of the parent node
    parents: Tensor
    # [R, N] int32, 1 for a child of the root
    depths: Tensor
    # [R, N] fp32, log of the path score
    log_rho: Tensor
    # [R] int32, columns in use
    num_nodes: Tensor

    def validate(self) -> None:
        """Assert the invariants."""
        for row, used in enumerate(self.num_nodes.tolist()):
            assert 0 <= used <= self.tokens.shape[1]
            for name, filler in _UNUSED.items():
                assert bool((getattr(self, name)[row, used:] == filler).all()), name
            parents, depth = self.parents[row].tolist(), [0, *self.depths[row].tolist()]
            scores, tokens = [0.0, *self.log_rho[row].tolist()], self.tokens[row].tolist()
            for column, parent in enumerate(parents[:used]):
                assert 0 <= parent <= column and depth[column + 1] == depth[parent] + 1
                assert scores[column + 1] <= scores[column]
            assert len(set(zip(parents[:used], tokens[:used]))) == used

    def prefix(self, limit: int) -> DraftTree:
        """The trees of the first `limit` columns."""
        return DraftTree(
            self.tokens[:, :limit], self.parents[:, :limit], self.depths[:, :limit],
            self.log_rho[:, :limit], self.num_nodes.clamp(max=limit),
        )  # fmt: skip

    def surrogate(self) -> Tensor:
        """`[R, N + 1]` float64: A-hat of the root and the n leading nodes, for every n."""
        root = torch.ones_like(self.log_rho[:, :1], dtype=torch.float64)
        return torch.cat([root, self.log_rho.double().exp()], dim=1).cumsum(1)

    def paths(self, row: int = 0) -> list[tuple[int, ...]]:
        """Token path of every node of one row, the root's empty one first."""
        paths: list[tuple[int, ...]] = [()]
        columns = zip(self.parents[row].tolist(), self.tokens[row].tolist(), strict=True)
        for parent, token in list(columns)[: int(self.num_nodes[row])]:
            paths.append((*paths[parent], token))
        return paths


def best_first(topk_tokens: Tensor, topk_logprobs: Tensor, limit: int) -> DraftTree:
    """The `limit` nodes of largest rho in the top-K lattice (Algorithm 1 without its budget).

    Args:
        topk_tokens: `[R, D, K]` int32, candidates of each depth, best first.
        topk_logprobs: `[R, D, K]` fp32, or `[R, D, K, K]` given each candidate of the depth above.
        limit: N, columns of the tree.
    """
    return _expand(topk_tokens, topk_logprobs, limit, topk_tokens.shape[2])


def chain(topk_tokens: Tensor, topk_logprobs: Tensor, limit: int) -> DraftTree:
    """The chain of best children, min(D, N) nodes: what vLLM's own drafters verify."""
    return _expand(topk_tokens, topk_logprobs, limit, 1)


def _expand(tokens: Tensor, logprobs: Tensor, limit: int, top_k: int) -> DraftTree:
    reqs, device = tokens.shape[0], tokens.device
    tree = DraftTree(
        torch.empty(reqs, limit, dtype=torch.int64, device=device),
        torch.empty(reqs, limit, dtype=torch.int32, device=device),
        torch.empty(reqs, limit, dtype=torch.int32, device=device),
        torch.empty(reqs, limit, dtype=torch.float32, device=device),
        torch.empty(reqs, dtype=torch.int32, device=device),
    )
    slots = torch.arange(reqs, device=device)
    out = tree.tokens, tree.parents, tree.depths, tree.log_rho, tree.num_nodes
    rows = logprobs[:, :, None] if logprobs.ndim == 3 else logprobs
    expand_best_first(tokens, rows, top_k, slots, *out)
    return tree
