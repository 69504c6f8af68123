# SPDX-License-Identifier: Apache-2.0
"""Path scores of a recorded step's tree, and which of its nodes the target accepts.

Replay needs no tree, only its scores and its outcome. Best-first trees are nested and sorted by
path score, so one number per depth is enough: `enter[d]` is the number of nodes that must be
verified to include the target's token at depth d + 1, and n nodes accept `sum(enter <= n)` tokens.

The N best prefixes of the top-K lattice are found level by level, without a heap. Consider the k-th
child of a depth's i-th best node (both from 0). (i + 1)(k + 1) - 1 children of its depth and i + 1
nodes above score at least as high, so it is among the N best only if (i + 1)(k + 2) <= N. About
N ln K candidates per depth remain, for array operations.

This requires that all nodes of a depth have the same children. If each has its own (scores
`[D, K, K]`, of each candidate given each one of the depth above), all children of a depth's N best
nodes are candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from benchmarks.replay.recording import Recording

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

# larger than any budget: the target's token is not in the tree
NEVER = 1 << 30


@dataclass(frozen=True)
class StepTree:
    """The nested best-first trees of one step."""

    # [N] path scores, non-increasing
    rho: FloatArray
    # [D] nodes to verify for the target's token at depth d + 1 to be among them, or NEVER
    enter: IntArray

    def accepted(self, num_nodes: int) -> int:
        """Draft tokens that a verification of the `num_nodes` best nodes accepts."""
        return int(np.count_nonzero(self.enter <= num_nodes))


def target_ranks(recording: Recording) -> NDArray[np.int64]:
    """[M, D] rank of the target's token among the candidates of each depth, -1 if it is none."""
    depth = recording.depth
    if not recording.num_steps:
        return np.zeros((0, depth), dtype=np.int64)
    starts = recording.token_offsets[recording.step_requests] + recording.step_positions
    truth = recording.tokens[starts[:, None] + np.arange(depth)]
    hits = recording.topk_tokens == truth[:, :, None]
    return np.where(hits.any(axis=2), hits.argmax(axis=2), -1)


def best_first(logprobs: NDArray[np.floating], ranks: IntArray, max_nodes: int) -> StepTree:
    """The `max_nodes` best nodes of one step.

    Args:
        logprobs: [D, K] log-probabilities, non-increasing over K; or unsorted [D, K, K], those of
            each candidate given each one of the depth above (at the first depth row 0: the root).
        ranks: [D] rank of the target's token at each depth, -1 if it is no candidate.
        max_nodes: N.
    """
    levels = (_levels if logprobs.ndim == 2 else _levels_by_parent)(logprobs, max_nodes)
    log_rho = -np.sort(-np.concatenate(levels))[:max_nodes]
    return StepTree(np.exp(log_rho), _enter(logprobs, ranks, log_rho))


def _levels(logprobs: NDArray[np.floating], max_nodes: int) -> list[FloatArray]:
    parents, ranks_of = _pairs(max_nodes, logprobs.shape[1])
    level = np.zeros(1)
    levels = []
    for row in logprobs:
        fits = parents < len(level)
        scores = level[parents[fits]] + row[ranks_of[fits]]
        level = -np.sort(-scores)[:max_nodes]
        levels.append(level)
    return levels


def _levels_by_parent(logprobs: NDArray[np.floating], max_nodes: int) -> list[FloatArray]:
    level, last = np.zeros(1), np.zeros(1, dtype=np.int64)
    levels = []
    for rows in logprobs:
        scores = (level[:, None] + rows[last]).ravel()
        best = np.argpartition(-scores, max_nodes)[:max_nodes] if len(scores) > max_nodes else ...
        last = np.arange(len(scores))[best] % rows.shape[1]
        level = scores[best]
        levels.append(level[level > -np.inf])
    return levels


def greedy_chain(logprobs: NDArray[np.floating]) -> tuple[IntArray, FloatArray]:
    """The best child at every depth: [D] candidates, and their log-probabilities.

    logprobs: as in `best_first`.
    """
    chain, scores, above = np.zeros(len(logprobs), dtype=np.int64), np.zeros(len(logprobs)), 0
    for d, rows in enumerate(_by_parent(logprobs)):
        chain[d] = rows[above].argmax()
        scores[d] = rows[above, chain[d]]
        above = chain[d]
    return chain, scores


def chain_accepted(logprobs: NDArray[np.floating], ranks: IntArray) -> int:
    """Draft tokens that the chain of best children accepts; see `best_first`."""
    wrong = np.flatnonzero(ranks != greedy_chain(logprobs)[0])
    return int(wrong[0]) if len(wrong) else len(ranks)


def beam_accepted(logprobs: NDArray[np.floating], ranks: IntArray, width: int) -> int:
    """Draft tokens that a `width` x D beam accepts: the best `width` extensions of every level.

    logprobs, ranks: as in `best_first`.
    """
    level, last, on_path = np.zeros(1), np.zeros(1, dtype=np.int64), 0
    for d, (rows, rank) in enumerate(zip(_by_parent(logprobs), ranks, strict=True)):
        scores = (level[:, None] + rows[last]).ravel()
        order = np.argsort(-scores, kind="stable")[:width]
        where = np.flatnonzero(order == on_path * rows.shape[1] + rank)
        if rank < 0 or not len(where):
            return d
        level, last, on_path = scores[order], order % rows.shape[1], int(where[0])
    return len(ranks)


def _by_parent(logprobs: NDArray[np.floating]) -> NDArray[np.floating]:
    """[D, K, K]; scores that do not depend on the parent are broadcast."""
    if logprobs.ndim == 3:
        return logprobs
    return np.broadcast_to(logprobs[:, None, :], (*logprobs.shape, logprobs.shape[1]))


def _enter(logprobs: NDArray[np.floating], ranks: IntArray, log_rho: FloatArray) -> IntArray:
    depth = len(ranks)
    enter = np.full(depth, NEVER, dtype=np.int64)
    off = np.flatnonzero(ranks < 0)
    known = int(off[0]) if len(off) else depth
    if known:
        own = ranks[:known]
        above = np.concatenate([[0], own[:-1]])
        steps = _by_parent(logprobs)[np.arange(known), above, own]
        path = np.cumsum(steps, dtype=np.float64)
        # the strictly better nodes and the node itself; a parent of equal score comes first
        position = np.searchsorted(-log_rho, -path - 1e-9, side="left") + 1
        position = np.maximum.accumulate(position - np.arange(known)) + np.arange(known)
        enter[:known] = np.where(position <= len(log_rho), position, NEVER)
    return enter


@lru_cache(maxsize=16)
def _pairs(max_nodes: int, top_k: int) -> tuple[IntArray, IntArray]:
    """(parent, rank) pairs that can be among the `max_nodes` best, in any order."""
    # the root does not count as a node, so its children are bounded by their own number alone
    parents = [np.arange(max(max_nodes // (k + 2), 1)) for k in range(top_k)]
    ranks = [np.full(len(column), k) for k, column in enumerate(parents)]
    return np.concatenate(parents), np.concatenate(ranks)
