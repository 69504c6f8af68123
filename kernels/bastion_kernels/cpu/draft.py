# SPDX-License-Identifier: Apache-2.0
"""The drafting ops on a CPU: the same trees, counts and tokens as the references, bit for bit.

Heap entries are packed into one int64 each: the score as an integer that sorts like it, and the
tie-breaker below it.
"""

from __future__ import annotations

import numpy as np

from bastion_kernels.cpu.cache import njit
from bastion_kernels.draft.best_first import ExpandBestFirst
from bastion_kernels.draft.take_best import TakeBest

_INFINITE = 0x7F800000  # bits of the fp32 +inf


@njit
def _push(heap, size, key):
    """Add `key` to the binary min-heap heap[:size]."""
    index = size
    while index > 0:
        above = (index - 1) >> 1
        if heap[above] <= key:
            break
        heap[index] = heap[above]
        index = above
    heap[index] = key


@njit
def _replace_top(heap, size, key):
    """Replace the smallest of heap[:size] by `key`."""
    index = 0
    while True:
        below = 2 * index + 1
        if below >= size:
            break
        if below + 1 < size and heap[below + 1] < heap[below]:
            below += 1
        if heap[below] >= key:
            break
        heap[index] = heap[below]
        index = below
    heap[index] = key


@njit
def _next_candidate(logprobs, r, depth, own, after):
    """The candidate after `after` in the row [r, depth, own], best first; -1 if none is left.

    after: -1 for the first. Ties go to the lower candidate.
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
    tokens, logprobs, children, in_order, slots,
    out_tokens, parents, depths, log_rho, num_nodes,
    ngram_tokens, places, ngram_rows, sources,
):  # fmt: skip
    """logprobs: [R, D, P, M]. in_order: P = 1, and a candidate's column is its rank; else P = M.
    ngram_tokens, places: [R, L], L = 0 without n-gram drafts. ngram_rows: [R, L, 1, M + 1]."""
    depth_limit, limit = tokens.shape[1], out_tokens.shape[1]
    ngram_limit, width = ngram_tokens.shape[1], tokens.shape[2]
    on_ngram = np.zeros(limit + 1, np.bool_)
    heap = np.empty(2 * limit + 2, np.int64)
    own_rows = np.zeros(limit + 1, np.int64)  # of each node's children
    cost = np.empty(1, np.float32)
    bits = cost.view(np.int32)
    for r in range(slots.shape[0]):
        slot = slots[r]
        if slot < 0:
            continue
        size, count = 0, 0
        on_ngram[0], own_rows[0] = ngram_limit > 0 and places[r, 0] >= 0, 0
        # children offered to the heap, up to two per round; first the root's first child
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
                own = own_rows[parent]
                extends_ngram = on_ngram[parent] and depth < ngram_limit
                off_ngram = not on_ngram[parent] and depth < depth_limit
                if (extends_ngram or off_ngram) and rank < children:
                    candidate = rank
                    if extends_ngram:
                        candidate = _next_candidate(ngram_rows, r, depth, 0, before)
                    elif not in_order:
                        candidate = _next_candidate(logprobs, r, depth, own, before)
                    if candidate < 0 or (not extends_ngram and candidate >= width):
                        continue
                    logprob = (
                        ngram_rows[r, depth, 0, candidate]
                        if extends_ngram
                        else logprobs[r, depth, own, candidate]
                    )
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
            stays = on_ngram[parent] and candidate == places[r, depth]
            out_tokens[r, count] = (
                tokens[r, depth, candidate] if candidate < width else ngram_tokens[r, depth]
            )
            if ngram_limit > 0:
                sources[slot, count] = 1 if not stays else (3 if candidate < width else 2)
            parents[slot, count] = parent
            depths[slot, count] = depth + 1
            log_rho[slot, count] = np.float32(0.0) - cost[0]
            count += 1
            on_ngram[count] = stays
            if not in_order:
                own_rows[count] = candidate
            offers = 2
            parent_a, rank_a, before_a, depth_a, above_a = count, 0, -1, depth + 1, cost[0]
            parent_b, rank_b, before_b, depth_b, above_b = parent, rank + 1, candidate, depth, above
        num_nodes[slot] = count
        out_tokens[r, count:] = 0
        parents[slot, count:] = -1
        depths[slot, count:] = 0
        log_rho[slot, count:] = -np.inf
        if ngram_limit > 0:
            sources[slot, count:] = 0


_NO_NGRAM, _NO_NGRAM_ROWS = np.empty((0, 0), np.int32), np.empty((0, 0, 0, 0), np.float32)


def expand_best_first(op: ExpandBestFirst) -> None:
    """Algorithm 1 with a heap."""
    ngram_tokens, places, ngram_rows, sources = _NO_NGRAM, _NO_NGRAM, _NO_NGRAM_ROWS, _NO_NGRAM
    if (ngram := op.ngram) is not None:
        ngram_tokens, places, sources = (
            part.numpy() for part in (ngram.tokens, ngram.places, ngram.sources)
        )
        ngram_rows = ngram.rows.numpy()[:, :, None]
    _expand(
        op.candidates.numpy(), op.logprobs.numpy(), op.top_k, op.stateless, op.slots.numpy(),
        op.out_tokens.numpy(), op.parents.numpy(),
        op.depths.numpy(), op.log_rho.numpy(), op.num_nodes.numpy(),
        ngram_tokens, places, ngram_rows, sources,
    )  # fmt: skip


@njit
def _key_of(score, row):
    """Smaller for a larger score, then for a lower row; -0.0 is 0.0."""
    cost = np.empty(1, np.float32)
    cost[0] = np.float32(0.0) - score
    bits = np.int64(cost.view(np.int32)[0])
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) << 32) | row


@njit
def _take(log_rho, slots, limits, total, counts):
    """Count each slot's nodes among the `total` best of all requests."""
    reqs, columns = slots.shape[0], log_rho.shape[1]
    heap = np.empty(reqs + 1, np.int64)
    heads = np.zeros(reqs, np.int64)
    size = 0
    for row in range(reqs):
        if slots[row] >= 0 and min(limits[slots[row]], columns) > 0:
            _push(heap, size, _key_of(log_rho[slots[row], 0], row))
            size += 1
    while size > 0 and total > 0:
        total -= 1
        row = heap[0] & 0xFFFFFFFF
        slot, column = slots[row], heads[row] + 1
        counts[slot] += 1
        heads[row] = column
        if column < min(limits[slot], columns):
            _replace_top(heap, size, _key_of(log_rho[slot, column], row))
        else:
            size -= 1
            if size > 0:
                _replace_top(heap, size, heap[size])


def take_best(op: TakeBest) -> None:
    """Merge the sorted lists up to `total` nodes."""
    slots, reqs = op.slots.numpy(), op.slots.shape[0]
    counts = np.zeros(op.log_rho.shape[0], np.int32)
    total = min(op.total, op.log_rho.numel())
    _take(op.log_rho.numpy(), slots, op.limits.numpy(), total, counts)
    active, root = slots >= 0, np.ones_like(counts)
    for start, others in ((op.logits_start, root), (op.rows_start, op.rest.numpy())):
        ends = start.numpy()[: reqs + 1]
        ends[0] = 0
        np.cumsum(np.where(active, (counts + others)[slots], 0), out=ends[1:])
