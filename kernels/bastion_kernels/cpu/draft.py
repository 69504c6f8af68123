# SPDX-License-Identifier: Apache-2.0
"""The drafting ops on a CPU: the same trees, counts and tokens as the references, bit for bit.

Candidates of a heap are packed in one int64 each: the score as an integer that sorts like it, and
what breaks ties below it.
"""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from bastion_kernels.cpu.cache import njit
from bastion_kernels.cpu.topk import topk_logprobs_cpu

__all__ = [
    "choose_budget_cpu",
    "expand_best_first_cpu",
    "expand_transitions_cpu",
    "take_best_cpu",
    "topk_logprobs_cpu",
]

_UNIT = 2**40  # units of rho = 1, as in `budget`
_INFINITE = 0x7F800000  # bits of the fp32 +inf


@njit
def _push(heap, size, key):
    """Add `key` to the binary min-heap heap[:size]."""
    at = size
    while at > 0:
        up = (at - 1) >> 1
        if heap[up] <= key:
            break
        heap[at] = heap[up]
        at = up
    heap[at] = key


@njit
def _replace_top(heap, size, key):
    """Put `key` in the place of the smallest of heap[:size]."""
    at = 0
    while True:
        down = 2 * at + 1
        if down >= size:
            break
        if down + 1 < size and heap[down + 1] < heap[down]:
            down += 1
        if heap[down] >= key:
            break
        heap[at] = heap[down]
        at = down
    heap[at] = key


@njit
def _next_candidate(logprobs, r, depth, own, after):
    """The one that follows candidate `after` in the row [r, depth, own], best first.

    after: -1 for the first. Ties go to the lower candidate; -1 where no possible one is left.
    """
    least, found = np.float32(np.inf), -1
    floor = np.float32(-1.0)
    if after >= 0:
        logprob = logprobs[r, depth, own, after]
        floor = -logprob if logprob < 0 else np.float32(0.0)
    for candidate in range(logprobs.shape[3]):
        logprob = logprobs[r, depth, own, candidate]
        cost = -logprob if logprob < 0 else np.float32(0.0)
        later = cost > floor or (cost == floor and candidate > after)
        if logprob == logprob and cost < least and later:
            least, found = cost, candidate
    return found


@njit
def _expand(
    tokens, logprobs, children, sorted_rows, slots,
    out_tokens, parents, depths, log_rho, num_nodes,
):  # fmt: skip
    """logprobs: [R, D, P, K], the row P of a child by its parent's candidate, or by none (P = 1);
    sorted_rows: whether a candidate's place in its row is its rank."""
    depth_limit, limit, by_parent = tokens.shape[1], out_tokens.shape[1], logprobs.shape[2] > 1
    heap = np.empty(2 * limit + 2, np.int64)
    held = np.zeros(limit + 1, np.int64)  # every node's candidate
    cost = np.empty(1, np.float32)
    bits = cost.view(np.int32)
    for r in range(slots.shape[0]):
        slot = slots[r]
        if slot < 0:
            continue
        size, count = 0, 0
        # what is offered to the heap: up to two children a round, the root's first one first
        offers, parent_a, rank_a, before_a, depth_a, parent_b, rank_b, before_b, depth_b = (
            1, 0, 0, -1, 0, 0, 0, -1, 0
        )  # fmt: skip
        above_a = above_b = np.float32(0.0)
        while True:
            for i in range(offers):
                parent, rank, before, depth, above = (
                    (parent_a, rank_a, before_a, depth_a, above_a)
                    if i == 0
                    else (parent_b, rank_b, before_b, depth_b, above_b)
                )
                if depth < depth_limit and rank < children:
                    own = held[parent] if by_parent else 0
                    candidate = rank
                    if not sorted_rows:
                        candidate = _next_candidate(logprobs, r, depth, own, before)
                        if candidate < 0:
                            continue
                    logprob = logprobs[r, depth, own, candidate]
                    cost[0] = above - logprob if logprob < 0 else above
                    # neither impossible nor NaN
                    if logprob == logprob and bits[0] < _INFINITE:
                        low = (parent << 16) | (candidate << 8) | rank
                        _push(heap, size, (np.int64(bits[0]) << 32) | low)
                        size += 1
            if size == 0 or count == limit:
                break
            key = heap[0]
            size -= 1
            if size > 0:
                _replace_top(heap, size, heap[size])
            bits[0] = key >> 32
            parent, candidate, rank = (key >> 16) & 0xFFFF, (key >> 8) & 0xFF, key & 0xFF
            depth = 0 if parent == 0 else depths[slot, parent - 1]
            above = np.float32(0.0) if parent == 0 else np.float32(0.0) - log_rho[slot, parent - 1]
            out_tokens[r, count] = tokens[r, depth, candidate]
            parents[slot, count] = parent
            depths[slot, count] = depth + 1
            log_rho[slot, count] = np.float32(0.0) - cost[0]
            count += 1
            held[count] = candidate
            offers = 2
            parent_a, rank_a, before_a, depth_a, above_a = count, 0, -1, depth + 1, cost[0]
            parent_b, rank_b, before_b, depth_b, above_b = parent, rank + 1, candidate, depth, above
        num_nodes[slot] = count
        out_tokens[r, count:] = 0
        parents[slot, count:] = -1
        depths[slot, count:] = 0
        log_rho[slot, count:] = -np.inf


def expand_best_first_cpu(
    topk_tokens: Tensor,
    topk_logprobs: Tensor,
    slots: Tensor,
    out_tokens: Tensor,
    parents: Tensor,
    depths: Tensor,
    log_rho: Tensor,
    num_nodes: Tensor,
) -> None:
    """Algorithm 1 with a heap; see `expand_best_first`."""
    _expand(
        topk_tokens.numpy(), topk_logprobs.numpy()[:, :, None], topk_tokens.shape[2], True,
        slots.numpy(), out_tokens.numpy(), parents.numpy(), depths.numpy(),
        log_rho.numpy(), num_nodes.numpy(),
    )  # fmt: skip


def expand_transitions_cpu(
    candidates: Tensor,
    logprobs: Tensor,
    top_k: int,
    slots: Tensor,
    out_tokens: Tensor,
    parents: Tensor,
    depths: Tensor,
    log_rho: Tensor,
    num_nodes: Tensor,
) -> None:
    """The same with a look through the parent's row for every child; see `expand_transitions`."""
    _expand(
        candidates.numpy(), logprobs.numpy(), top_k, False,
        slots.numpy(), out_tokens.numpy(), parents.numpy(), depths.numpy(),
        log_rho.numpy(), num_nodes.numpy(),
    )  # fmt: skip


@njit
def _key_of(score, row):
    """Smaller for a larger score, then for a lower row; -0.0 is 0.0."""
    cost = np.empty(1, np.float32)
    cost[0] = np.float32(0.0) - score
    bits = np.int64(cost.view(np.int32)[0])
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) << 32) | row


@njit
def _merge(log_rho, slots, limits, floor, cost_ms, base, total, num_verify, promised):
    """Walk down the list of all requests' nodes of at least `floor`, the best first.

    With `total` < 0 the best n is searched by cost, else the `total` best are taken.
    """
    reqs, columns = slots.shape[0], log_rho.shape[1]
    heap = np.empty(reqs + 1, np.int64)
    heads = np.zeros(reqs, np.int64)
    size, active = 0, 0
    for row in range(reqs):
        slot = slots[row]
        if slot < 0:
            continue
        active += 1
        num_verify[slot] = 0
        if promised.shape[0] > 0:
            promised[slot] = 0.0
        if min(limits[slot], columns) > 0 and log_rho[slot, 0] >= floor:
            _push(heap, size, _key_of(log_rho[slot, 0], row))
            size += 1
    searching = total < 0
    most = cost_ms.shape[0] - 1 - base if searching else total
    sums = np.zeros(reqs if searching else 0, np.int64)
    mass, best, n, best_n = active * _UNIT, 0.0, 0, 0
    if searching and most >= 0:
        best = mass / np.float64(cost_ms[base])
    # rows in the order in which their nodes were taken, to hand out the best n of them
    order = np.empty(reqs * columns if searching else 0, np.int32)
    while size > 0 and n < most:
        row = heap[0] & 0xFFFFFFFF
        slot, column = slots[row], heads[row]
        if searching:
            order[n] = row
            mass += np.int64(math.exp(np.float64(log_rho[slot, column])) * _UNIT)
        else:
            num_verify[slot] += 1
        n += 1
        heads[row] = column + 1
        if column + 1 < min(limits[slot], columns) and log_rho[slot, column + 1] >= floor:
            _replace_top(heap, size, _key_of(log_rho[slot, column + 1], row))
        else:
            size -= 1
            if size > 0:
                _replace_top(heap, size, heap[size])
        if searching:
            speed = mass / np.float64(cost_ms[base + n])
            if speed > best:
                best, best_n = speed, n
    for i in range(best_n):
        row = order[i]
        slot = slots[row]
        sums[row] += np.int64(math.exp(np.float64(log_rho[slot, num_verify[slot]])) * _UNIT)
        num_verify[slot] += 1
    if promised.shape[0] > 0:
        for row in range(reqs):
            if slots[row] >= 0:
                promised[slots[row]] = sums[row] / np.float64(_UNIT)


_NO_COST, _NO_PROMISE = np.ones(1, np.float32), np.empty(0, np.float32)


def choose_budget_cpu(
    log_rho: Tensor,
    slots: Tensor,
    limits: Tensor,
    cost_ms: Tensor,
    base_rows: int | Tensor,
    num_verify: Tensor,
    promised: Tensor | None = None,
) -> None:
    """Merge the sorted lists, keep the best S; see `choose_budget`."""
    promise = _NO_PROMISE if promised is None else promised.numpy()
    _merge(
        log_rho.numpy(), slots.numpy(), limits.numpy(), np.finfo(np.float32).min, cost_ms.numpy(),
        int(base_rows), -1, num_verify.numpy(), promise,
    )  # fmt: skip


def take_best_cpu(
    log_rho: Tensor,
    slots: Tensor,
    limits: Tensor,
    rest: Tensor,
    total: int,
    logits_start: Tensor,
    rows_start: Tensor,
    scratch: Tensor,
) -> None:
    """Merge the sorted lists as far as needed; see `take_best`."""
    of, reqs = slots.numpy(), slots.shape[0]
    counts = np.zeros(log_rho.shape[0], np.int32)
    _merge(
        log_rho.numpy(), of, limits.numpy(), np.float32(-np.inf), _NO_COST, 0,
        min(total, log_rho.numel()), counts, _NO_PROMISE,
    )  # fmt: skip
    active = of >= 0
    for start, more in ((logits_start, np.ones_like(counts)), (rows_start, rest.numpy())):
        ends = start.numpy()[: reqs + 1]
        ends[0] = 0
        np.cumsum(np.where(active, (counts + more)[of], 0), out=ends[1:])
