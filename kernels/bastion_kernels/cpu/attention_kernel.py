# SPDX-License-Identifier: Apache-2.0
"""The loops of `attention.cpu`, compiled by Numba and run by all of PyTorch's threads.

The work is cut into units: a key head of a request, and up to `_BLOCK` of the rows that read it (a
row of every query head that shares the key head is a row here). A unit passes over the cached
tokens in tiles: scores, their exponentials against the largest so far, and the values' sum. Cached
rows that a row sees are a range [low, high): a causal row's ends with itself, a tail's where it
begins.

The tail's own rows come last, an ancestor after the other in the order of their depth, in float32.
What a row gets thus depends on nothing but its path: not on its place in the tree, nor on the rows
around it, so that a path has the same bits in a tree and as a chain.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numba import carray

from bastion_kernels.cpu.attention_score import (
    GROUP,
    LOWEST,
    SHAPE,
    TILE,
    capped,
    exp,
    mix,
    place,
    rounded,
    score,
    soften,
    value,
    widened,
)
from bastion_kernels.cpu.machine import (
    add_atomically,
    add_rows,
    bits_of,
    lowest_bit,
    pointer,
    tile_config,
    tile_release,
)
from bastion_kernels.cpu.native import compile_for_threads, inner

__all__ = [
    "CALL", "OF_LAYER", "OF_ROWS", "OF_STEP", "SHORT_CHUNK", "compiled", "scratch_bytes",
]  # fmt: skip

SHORT_CHUNK = 64  # a causal run of at most so many rows is a chain, and gets a chain's bits
_BLOCK = 128  # rows of a unit: what shares a tile of keys and values while it is near
_FAR = 2**60  # length of a flat array whose end nobody knows

# What a call is told, by who knows it: addresses, numbers, and strides in elements.
_ROWS = (
    "scratch", "scratch_bytes", "threads", "query", "query_row", "query_head", "out", "out_row",
    "out_head",
)  # fmt: skip
_STEP = (
    "requests", "tail_limit", "table", "table_row", "starts", "lengths", "tails", "slots", "bits",
    "bits_slot", "bits_row", "depths", "depths_slot",
)  # fmt: skip
_LAYER = (
    "counters", "group", "kv_heads", "dim", "page", "by_channel", "cache", "cache_block",
    "cache_head", "places", "window", "sinks", "form", "cache_form", "matrix",
)  # fmt: skip
CALL = np.dtype(
    [(name, np.int64) for name in (*_ROWS, *_STEP, *_LAYER)]
    + [(name, np.float32) for name in ("scale", "softcap", "value_scale")],
    align=True,  # so that it is a whole number of integers
)
# Each one's part of a call seen as 64-bit integers.
OF_ROWS = slice(0, len(_ROWS))
OF_STEP = slice(OF_ROWS.stop, OF_ROWS.stop + len(_STEP))
OF_LAYER = slice(OF_STEP.stop, OF_STEP.stop + len(_LAYER))


def scratch_bytes(dim: int, tail_limit: int) -> int:
    """What one thread needs of scratch for heads of `dim` channels and tails up to `tail_limit`."""
    wide = -(-dim // GROUP) * GROUP
    floats = 1088 + 2 * GROUP * TILE + _BLOCK * (2 * dim + wide) + tail_limit * (wide + 2 * GROUP)
    return 64 * -(-4 * (floats + TILE * (dim + wide)) // 64)


@inner
def _see(t, words, node, depths, root, low, tile, tokens, scores, seen, kept, number):
    """Append the nodes of a tile that a tail's row sees to `seen`, and their scores to `kept`.

    words: the row's ancestor bits, none for a chain; depths: of nodes from 1 on, none without a
    window; low: the first position inside the row's window.
    """
    for word in range((node >> 5) + 1):
        mask = np.uint32(0xFFFFFFFF)
        if word == node >> 5:
            mask >>= np.uint32(31 - (node & 31))
        if words.shape[0]:
            itself = np.uint32(1) << np.uint32(node & 31) if word == node >> 5 else np.uint32(0)
            mask &= np.uint32(words[word]) | itself
        while mask:
            other = np.int64(word * 32 + lowest_bit(mask))
            mask &= mask - np.uint32(1)
            at = root + other - tile
            position = root + (depths[other - 1] if depths.shape[0] and other > 0 else other)
            if 0 <= at < tokens and position >= low:
                scaled = t.scale * scores[at]
                kept[number] = capped(scaled, t.softcap) if t.softcap > 0 else scaled
                seen[number] = other
                number += 1
    return number


@inner
def _finish(top, mass, sink, line, at, width, values, seen, kept, first, count, scale):
    """A row's average: the tail's nodes added to its sum, and its sink; then the division."""
    largest = max(top, sink)
    for i in range(first, first + count):
        largest = max(largest, kept[i])
    factor = exp(top - largest)
    total = mass * factor + (exp(sink - largest) if sink > LOWEST else np.float32(0.0))
    for i in range(first, first + count):
        kept[i] = exp(kept[i] - largest)
        total += kept[i]
    add_rows(line, at, width, factor, values, seen, kept, first, count, scale / total)


@inner
def _widen(bits, form, out):
    for c in range(out.shape[0]):
        out[c] = widened(bits[c], form)


@inner
def _run(t, query, cache, floats, out):
    """Take units until there are none. query, cache, out: flat, bits of numbers."""
    dim, page, group = t.dim, t.page, t.group
    wide, limit = -(-dim // GROUP) * GROUP, t.tail_limit
    counters = carray(pointer(t.counters), (2,), np.int64)
    me = t.scratch + t.scratch_bytes * add_atomically(counters, 1)
    arena = carray(pointer(me), (t.scratch_bytes // 4,), np.float32)
    ends = np.cumsum(np.array([
        256, 256, 256, 64, 128, 128, GROUP * TILE, GROUP * TILE // 2, _BLOCK * dim,
        _BLOCK * dim // 2, _BLOCK * wide, GROUP * limit, GROUP * limit, limit * wide,
    ]))  # fmt: skip
    at, low = arena[: ends[0]].view(np.int64), arena[ends[0] : ends[1]].view(np.int64)
    high, numbers = arena[ends[1] : ends[2]].view(np.int64), arena[ends[2] : ends[3]].view(np.int64)
    top, mass = arena[ends[3] : ends[4]], arena[ends[4] : ends[5]]
    scores, weights = arena[ends[5] : ends[6]], arena[ends[6] : ends[7]].view(np.int16)
    asked, asked_bits = arena[ends[7] : ends[8]], arena[ends[8] : ends[9]].view(np.int16)
    mixed, kept = arena[ends[9] : ends[10]], arena[ends[10] : ends[11]]
    seen, values = arena[ends[11] : ends[12]].view(np.int32), arena[ends[12] : ends[13]]
    work = asked, asked_bits, scores, weights, arena[ends[13] :], at

    starts = carray(pointer(t.starts), (t.requests + 1,), np.int32)
    lengths = carray(pointer(t.lengths), (t.requests,), np.int32)
    tails = carray(pointer(t.tails), (t.requests,), np.int32)
    slots = carray(pointer(t.slots), (t.requests,), np.int64)
    bits = carray(pointer(t.bits), (_FAR,), np.int32)
    all_depths = carray(pointer(t.depths), (_FAR,), np.int32)
    sinks = carray(pointer(t.sinks), (t.kv_heads * group,), np.float32)

    # smaller units where there are few
    block = _BLOCK
    while block > GROUP:
        units = 0
        for r in range(t.requests):
            units += -(-(starts[r + 1] - starts[r]) * group // block) * t.kv_heads
        if units >= 3 * t.threads:
            break
        block //= 2

    if t.matrix:
        tile_config(SHAPE, 0)
    mine, before, r = add_atomically(counters, 0), 0, 0
    while r < t.requests:
        count, length = np.int64(starts[r + 1] - starts[r]), np.int64(lengths[r])
        blocks = -(-count * group // block)
        if mine >= before + blocks * t.kv_heads:
            before += blocks * t.kv_heads
            r += 1
            continue
        head, part = divmod(mine - before, blocks)
        packed, mine = part * block, add_atomically(counters, 0)
        rows = min(block, count * group - packed)
        slot, tail = slots[r], np.int64(tails[r])
        if slot < 0 or tail < 2:
            slot, tail = -1, count if count <= SHORT_CHUNK else 0
        root = length - tail  # where the tail begins in the cache
        table = carray(pointer(t.table + 4 * r * t.table_row), (t.table_row,), np.int32)
        depths = all_depths[:0]
        if t.window and slot >= 0:
            depths = all_depths[slot * t.depths_slot : (slot + 1) * t.depths_slot]

        start, end = length, np.int64(0)
        for i in range(rows):
            row, member = divmod(packed + i, group)
            node = row - (count - tail)
            position = length - count + row
            if depths.shape[0] and node > 0:
                position = root + depths[node - 1]
            low[i] = max(position + 1 - t.window, 0) if t.window else 0
            high[i] = root if node >= 0 else position + 1
            start, end = min(start, low[i]), max(end, high[i])
            top[i], mass[i] = LOWEST, 0
            source = (starts[r] + row) * t.query_row + (head * group + member) * t.query_head
            asking = query[source : source + dim]
            _widen(asking, t.form, asked[i * dim : (i + 1) * dim])
            asked_bits[i * dim : (i + 1) * dim] = asking
        mixed[: rows * wide] = 0
        tile = start // GROUP * GROUP
        while tile < end:
            # tiles lie at the same places in every unit: where they end shows in the last bits
            tokens = min(TILE - tile % TILE, end - tile)
            place(t, cache, head, table, tile, tokens, True, work)
            for first in range(0, rows, GROUP):
                score(t, cache, floats, first, rows, tokens, work)
                soften(t, tile, tokens, first, rows, low, high, top, mass, mixed, wide, work)
                mix(t, cache, floats, first, rows, tokens, mixed, work)
            tile += tokens

        for node in range(tail):
            in_table, offset = divmod(root + node, page)
            slab = table[in_table] * t.cache_block + head * t.cache_head
            value(t, cache, slab, offset, values[node * wide : node * wide + dim])
        for first in range(0, rows, GROUP):
            last = min(first + GROUP, rows)
            numbers[:] = 0
            for tile in range(root // GROUP * GROUP, length if tail else 0, TILE):
                tokens = min(TILE, length - tile)
                if first == 0 or length - root > TILE - GROUP:
                    place(t, cache, head, table, tile, tokens, False, work)
                score(t, cache, floats, first, rows, tokens, work)
                for i in range(first, last):
                    node, j = (packed + i) // group - (count - tail), i - first
                    words = bits[:0]
                    if slot >= 0:
                        words = bits[slot * t.bits_slot + node * t.bits_row :]
                    mine_only = slice(limit * j, limit * (j + 1))
                    numbers[j] = _see(
                        t, words, node, depths, root, low[i], tile, tokens,
                        scores[TILE * j : TILE * (j + 1)], seen[mine_only], kept[mine_only],
                        numbers[j],
                    )  # fmt: skip
            for i in range(first, last):
                row, member = divmod(packed + i, group)
                j, member = i - first, head * group + member
                sink = sinks[member] if t.sinks else LOWEST
                _finish(
                    top[i], mass[i], sink, mixed, i * wide, wide, values, seen, kept, limit * j,
                    numbers[j], t.value_scale,
                )  # fmt: skip
                target = (starts[r] + row) * t.out_row + member * t.out_head
                into, line = out[target : target + dim], mixed[i * wide : i * wide + dim]
                if t.form:
                    for c in range(dim):
                        into[c] = rounded(line[c], t.form)
                else:
                    for c in range(dim):
                        into[c] = bits_of(line[c])
    if t.matrix:
        tile_release()


@inner
def _run_with(told, number, cached):
    t = carray(told, (1,), CALL)[0]
    query = carray(pointer(t.query), (_FAR,), number)
    cache = carray(pointer(t.cache), (_FAR,), cached)
    out = carray(pointer(t.out), (_FAR,), number)
    _run(t, query, cache, carray(pointer(t.cache), (_FAR,), np.float32), out)


def _run_16(told):
    _run_with(told, np.int16, np.int16)


def _run_32(told):
    _run_with(told, np.int32, np.int32)


def _run_16_over_8(told):
    _run_with(told, np.int16, np.uint8)


def _run_32_over_8(told):
    _run_with(told, np.int32, np.uint8)


_RUNS = {(2, 2): _run_16, (4, 4): _run_32, (2, 1): _run_16_over_8, (4, 1): _run_32_over_8}


@lru_cache
def compiled(size: int, cache_size: int) -> Any:
    """The loops for a query's and a cached number of so many bytes; see `on_all_threads`."""
    run = _RUNS[size, cache_size]
    return compile_for_threads(run)
