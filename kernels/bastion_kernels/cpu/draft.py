# SPDX-License-Identifier: Apache-2.0
"""The drafting ops on a CPU: the same trees, counts and tokens as the references, bit for bit.

Heap entries are packed into one int64 each: the score as an integer that sorts like it, and the
tie-breaker below it.
"""

from __future__ import annotations

import numpy as np

from bastion_kernels.cpu.cache import native, njit

_INFINITE = 0x7F800000  # bits of the fp32 +inf
_NO_NGRAM, _NO_ROWS = np.empty((0, 0), np.int32), np.empty((0, 0, 0), np.float32)


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
def _next_candidate(row, after):
    """The candidate after `after` in a row of log-probabilities, best first; -1 if none is left.

    after: -1 for the first. Ties go to the lower candidate.
    """
    least, found = np.float32(np.inf), -1
    floor = np.float32(-1.0)
    if after >= 0:
        floor = -row[after] if row[after] < 0 else np.float32(0.0)
    for candidate in range(row.shape[0]):
        logprob = row[candidate]
        cost = -logprob if logprob < 0 else np.float32(0.0)
        later = cost > floor or (cost == floor and candidate > after)
        if logprob == logprob and cost < least and later:
            least, found = cost, candidate
    return found


@native
def expand_best_first(
    candidates, logprobs, top_k, stateless, slots, out_tokens, parents, depths, log_rho, num_nodes,
    ngram_tokens=_NO_NGRAM, places=_NO_NGRAM, ngram_rows=_NO_ROWS, sources=_NO_NGRAM,
):  # fmt: skip
    """Algorithm 1 with a heap. If `stateless`, a candidate's column is its rank."""
    depth_limit, limit = candidates.shape[1], out_tokens.shape[1]
    ngram_limit, width = ngram_tokens.shape[1], candidates.shape[2]
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
        # children to push: a, the new node's first, and b, its next sibling; now the root's first
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
                if (extends_ngram or off_ngram) and rank < top_k:
                    candidate = rank
                    if extends_ngram:
                        candidate = _next_candidate(ngram_rows[r, depth], before)
                    elif not stateless:
                        candidate = _next_candidate(logprobs[r, depth, own], before)
                    if candidate < 0 or (not extends_ngram and candidate >= width):
                        continue
                    logprob = (
                        ngram_rows[r, depth, candidate]
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
                candidates[r, depth, candidate] if candidate < width else ngram_tokens[r, depth]
            )
            if ngram_limit > 0:
                sources[slot, count] = 1 if not stays else (3 if candidate < width else 2)
            parents[slot, count] = parent
            depths[slot, count] = depth + 1
            log_rho[slot, count] = np.float32(0.0) - cost[0]
            count += 1
            on_ngram[count] = stays
            if not stateless:
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


@njit
def _key_of(score, row):
    """Smaller for a larger score, then for a lower row; -0.0 is 0.0."""
    cost = np.empty(1, np.float32)
    cost[0] = np.float32(0.0) - score
    bits = np.int64(cost.view(np.int32)[0])
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) << 32) | row


@native
def take_best(log_rho, slots, limits, rest, total, logits_start, rows_start):
    """Merge the sorted lists up to `total` nodes."""
    reqs, columns = slots.shape[0], log_rho.shape[1]
    heap = np.empty(reqs + 1, np.int64)
    counts = np.zeros(reqs, np.int64)
    size = 0
    for row in range(reqs):
        if slots[row] >= 0 and min(limits[slots[row]], columns) > 0:
            _push(heap, size, _key_of(log_rho[slots[row], 0], row))
            size += 1
    while size > 0 and total > 0:
        total -= 1
        row = heap[0] & 0xFFFFFFFF
        slot, column = slots[row], counts[row] + 1
        counts[row] = column
        if column < min(limits[slot], columns):
            _replace_top(heap, size, _key_of(log_rho[slot, column], row))
        else:
            size -= 1
            if size > 0:
                _replace_top(heap, size, heap[size])
    logits_start[0] = rows_start[0] = 0
    for row in range(reqs):
        slot, nodes = slots[row], counts[row]
        logits_start[row + 1] = logits_start[row] + (nodes + 1 if slot >= 0 else 0)
        rows_start[row + 1] = rows_start[row] + (nodes + rest[slot] if slot >= 0 else 0)
