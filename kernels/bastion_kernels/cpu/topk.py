# SPDX-License-Identifier: Apache-2.0
"""The loops of `topk_logprobs_cpu`, compiled by Numba and run by all of PyTorch's threads.

A thread takes one row after another, in parts that stay in the first cache: widened to float32,
reduced to the largest of every 64 and to a sum. Of what was reduced only the best is looked at
again.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numba import carray

from bastion_kernels.cpu.machine import (
    add_atomically,
    bits_of,
    exp_of,
    float_of,
    largest_of_each,
    pointer,
    widen,
)
from bastion_kernels.cpu.native import compile_for_threads, inner

__all__ = ["CALL", "compiled", "scratch_bytes"]

_SEGMENT = 64  # logits behind one maximum
_PART = 2048  # logits that are summed together

# What a call is told: addresses, strides in bytes and numbers. half: logits are bfloat16.
CALL = np.dtype([
    (name, np.int64)
    for name in (
        "rows_done", "started", "scratch", "scratch_bytes", "logits", "row_bytes", "rows", "vocab",
        "half", "k", "tokens", "tokens_bytes", "logprobs", "logprobs_bytes",
    )
])  # fmt: skip


def scratch_bytes(vocab: int, k: int) -> int:
    """What a thread works in: a part and its powers, the K best, and all maxima."""
    return 8 * _PART + 8 * k + 4 * (-(-vocab // _SEGMENT))


@inner
def _load(row, half, first, count, part):
    """part[:count] = the row's logits from `first` on; -inf up to a whole segment."""
    if half:
        bits = carray(pointer(row + 2 * first), (count,), np.int16)
        done = count // 32 * 32
        if done:
            widen(bits, 0, part, 0, done // 32, 32, 32)
        for i in range(done, count):
            part[i] = float_of(np.int32(bits[i]) << np.int32(16))
    else:
        part[:count] = carray(pointer(row + 4 * first), (count,), np.float32)
    for i in range(count, (count + _SEGMENT - 1) // _SEGMENT * _SEGMENT):
        part[i] = -np.inf


@inner
def _reduce(row, half, vocab, part, powers, maxima):
    """The largest logit and log sum exp(logit - largest), which is NaN where a logit is."""
    top, total, undefined = np.float32(-np.inf), np.float32(0.0), False
    for first in range(0, vocab, _PART):
        count = min(_PART, vocab - first)
        _load(row, half, first, count, part)
        begin, segments = first // _SEGMENT, (count + _SEGMENT - 1) // _SEGMENT
        undefined |= largest_of_each(part, segments, maxima, begin)
        largest = np.float32(-np.inf)
        for segment in range(begin, begin + segments):
            if maxima[segment] > largest:
                largest = maxima[segment]
        if not abs(largest) < np.inf:
            undefined |= largest > 0
            continue
        width = (count + 15) // 16 * 16
        mass = exp_of(part, 0, 0, count, width, np.float32(1.0), largest, powers, 0)
        if largest > top:
            total = total * np.exp(top - largest) + mass
            top = largest
        else:
            total += mass * np.exp(largest - top)
    return top, np.float32(np.nan) if undefined else np.log(total)


@inner
def _select(row, half, vocab, maxima, best, part):
    """The best keys, larger is better: how a logit sorts, then the lower token."""
    k, size, threshold = best.shape[0], 0, np.float32(-np.inf)
    for segment in range(maxima.shape[0]):
        # a later token must be larger: equal ones lose the tie
        if size == k and maxima[segment] <= threshold:
            continue
        first = segment * _SEGMENT
        count = min(_SEGMENT, vocab - first)
        _load(row, half, first, count, part)
        for i in range(count):
            value = part[i]
            if size == k and not value > threshold:
                continue
            # NaN counts as -inf, and -0.0 as 0.0
            value = value + np.float32(0.0) if value == value else np.float32(-np.inf)
            order = np.int64(bits_of(value))
            order ^= (order >> 31) & 0x7FFFFFFF
            key = (order << 32) | (0x7FFFFFFF - (first + i))
            at = size if size < k else k - 1
            while at > 0 and best[at - 1] < key:
                best[at] = best[at - 1]
                at -= 1
            best[at] = key
            size = min(size + 1, k)
            if size == k:
                threshold = _logit(best[k - 1])


@inner
def _logit(key):
    order = key >> 32
    return float_of(np.int32(order ^ ((order >> 31) & 0x7FFFFFFF)))


def _run(told):
    t = carray(told, (1,), CALL)[0]
    counters = carray(told, (2,), np.int64)
    # Of the threads there are, not of those asked for: a nested region has one.
    mine = t.scratch + add_atomically(counters, 1) * t.scratch_bytes
    best = carray(pointer(mine), (t.k,), np.int64)
    part = carray(pointer(mine + 8 * t.k), (_PART,), np.float32)
    powers = carray(pointer(mine + 8 * t.k + 4 * _PART), (_PART,), np.float32)
    segments = (t.vocab + _SEGMENT - 1) // _SEGMENT
    maxima = carray(pointer(mine + 8 * t.k + 8 * _PART), (segments,), np.float32)
    while True:
        row = add_atomically(counters, 0)
        if row >= t.rows:
            break
        logits = t.logits + row * t.row_bytes
        largest, mass = _reduce(logits, t.half, t.vocab, part, powers, maxima)
        _select(logits, t.half, t.vocab, maxima, best, part)
        tokens = carray(pointer(t.tokens + row * t.tokens_bytes), (t.k,), np.int32)
        logprobs = carray(pointer(t.logprobs + row * t.logprobs_bytes), (t.k,), np.float32)
        for rank in range(t.k):
            tokens[rank] = 0x7FFFFFFF - (best[rank] & 0x7FFFFFFF)
            logprobs[rank] = _logit(best[rank]) - largest - mass


@lru_cache
def compiled() -> Any:
    """The loops; see `on_all_threads`."""
    return compile_for_threads(_run)
