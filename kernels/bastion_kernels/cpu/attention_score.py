# SPDX-License-Identifier: Apache-2.0
"""Attention over a tile of cached tokens on a CPU, by matrix registers or by vectors.

Parts of the loops in `cpu_kernel`, compiled by Numba. `t` is what the call was told, `work` the
thread's scratch: queries in float32 and as they came, scores [32, TILE], weights, room for keys and
values that have to be rearranged, and where each group of tokens lies.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np
from numba import carray

from bastion_kernels.cpu.machine import (
    bits_of,
    exp_of,
    float_of,
    float_of_half,
    half_of,
    largest_of,
    multiply_8x32,
    pointer,
    tile_load,
    tile_multiply,
    tile_store,
    tile_zero,
    widen,
)
from bastion_kernels.cpu.native import inner

__all__ = [
    "GROUP", "LOWEST", "SHAPE", "TILE", "capped", "exp", "mix", "place", "rounded", "score",
    "soften", "value", "widened",
]  # fmt: skip

TILE = 256  # cached tokens that are scored at once
GROUP = 32  # tokens whose keys lie together
LOWEST = np.float32(-1e30)
# eight matrix registers of 16 rows of 64 bytes
SHAPE = np.array([1] + 15 * [0] + 8 * [64, 0] + 16 * [0] + 8 * [16] + 8 * [0], np.uint8)


@inner
def widened(number, form):
    """The float32 of the bits of a float32 (form 0), bfloat16 (1), float16 (2) or float8.

    A float8 is taken for the high bits of a float16: exact for e5m2 (form 4), and 1/256 of what it
    is for e4m3 (form 3), which the scales of the call make up for.
    """
    if form >= 3:
        bits = np.int32(number)
        return float_of_half(np.int16((bits & 0x80) << 8 | (bits & 0x7F) << (form + 4)))
    if form == 2:
        return float_of_half(np.int16(number))
    return float_of(np.int32(number) << (16 if form else 0))


@inner
def rounded(number, form):
    """The bits of what is nearest to a float32 in bfloat16 or float16."""
    if form == 2:
        return half_of(number)
    bits = bits_of(number)
    if bits & 0x7FFFFFFF > 0x7F800000:
        return np.int16(0x7FC0)
    return np.int16((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)


@partial(inner, fastmath={"contract"})
def exp(x):
    """exp of a float32 up to some tens, to its last bits; tiny below -87."""
    x = max(x, np.float32(-87.0))
    shifted = x * np.float32(1.44269504088896) + np.float32(12582912.0)
    whole = shifted - np.float32(12582912.0)
    x = x - whole * np.float32(0.693359375) - whole * np.float32(-2.12194440e-4)
    y = np.float32(1.9875691500e-4)
    y = y * x + np.float32(1.3981999507e-3)
    y = y * x + np.float32(8.3334519073e-3)
    y = y * x + np.float32(4.1665795894e-2)
    y = y * x + np.float32(1.6666665459e-1)
    y = y * x + np.float32(5.0000001201e-1)
    y = y * x * x + x + np.float32(1.0)
    return y * float_of((bits_of(shifted) - np.int32(0x4B400000 - 127)) << 23)


@inner
def capped(number, softcap):
    """softcap * tanh(number / softcap), all float32: other numbers would be float64."""
    one, most = np.float32(1.0), np.float32(40.0)
    power = exp(min(max(np.float32(2.0) * number / softcap, -most), most))
    return softcap * (power - one) / (power + one)


@inner
def soften(t, tile, tokens, first, rows, low, high, top, mass, mixed, wide, work):
    """Scores [32, TILE] of rows from `first` on become weights against the largest so far."""
    _, _, scores, weights, _, _ = work
    width = -(-tokens // GROUP) * GROUP
    for row in range(first, min(first + GROUP, rows)):
        line, scale = (row - first) * TILE, t.scale
        begin, end = max(low[row] - tile, 0), min(high[row] - tile, tokens)
        if t.softcap > 0:
            for i in range(line, line + width):
                scores[i] = capped(scale * scores[i], t.softcap)
            scale = np.float32(1.0)
        largest = scale * largest_of(scores, line, begin, end, width)
        if largest > top[row] and begin < end:
            factor = np.float32(math.exp(top[row] - largest))
            top[row] = largest
            mass[row] *= factor
            so_far = mixed[row * wide : (row + 1) * wide]
            for c in range(wide):
                so_far[c] *= factor
        if t.matrix:
            mass[row] += exp_of(scores, line, begin, end, width, scale, top[row], weights, line)
        else:
            mass[row] += exp_of(scores, line, begin, end, width, scale, top[row], scores, line)


@inner
def _place_tiles(t, cache, head, table, tile, tokens, with_values, work):
    """Find a tile of cached tokens in a cache packed for matrix registers."""
    _, _, _, _, panel, at = work
    last, step = panel.view(np.int16), 16 * t.page
    for group in range(-(-tokens // GROUP)):
        block, offset = divmod(tile + GROUP * group, t.page)
        slab = table[block] * t.cache_block + head * t.cache_head
        at[group], at[64 + group] = slab + offset * t.dim, slab + t.page * t.dim + offset * 16
    rest, value = tokens % GROUP, at[64 + tokens // GROUP]
    if with_values and rest:
        # nobody's values may be anything, and a weight of 0 does not help against NaN
        whole = rest // 2 * 32
        for c in range(t.dim // 16):
            into, source = last[512 * c : 512 * (c + 1)], value + c * step
            into[:whole] = cache[source : source + whole]
            into[whole:] = 0
            if rest % 2:
                for i in range(whole, whole + 32, 2):
                    into[i] = cache[source + i]


@inner
def _score_tiles(t, cache, first, rows, tokens, work):
    """Scores [32, TILE] of rows from `first` on."""
    _, asked, scores, _, _, at = work
    dim, both = t.dim, rows - first > 16
    for group in range(-(-tokens // GROUP)):
        tile_zero(4)
        tile_zero(5)
        tile_zero(6)
        tile_zero(7)
        for c in range(0, dim, 32):
            tile_load(2, cache, at[group] + 16 * c, 64)
            tile_load(3, cache, at[group] + 16 * (dim + c), 64)
            tile_load(0, asked, first * dim + c, 2 * dim)
            tile_multiply(4, 0, 2)
            tile_multiply(5, 0, 3)
            if both:
                tile_load(1, asked, (first + 16) * dim + c, 2 * dim)
                tile_multiply(6, 1, 2)
                tile_multiply(7, 1, 3)
        to = GROUP * group
        tile_store(4, scores, to, 4 * TILE)
        tile_store(5, scores, to + 16, 4 * TILE)
        if both:
            tile_store(6, scores, to + 16 * TILE, 4 * TILE)
            tile_store(7, scores, to + 16 * TILE + 16, 4 * TILE)


@inner
def _mix_tiles(t, cache, first, rows, tokens, mixed, work):
    """Add weights @ values of a tile to mixed [rows, dim]."""
    _, _, _, weights, panel, at = work
    last, dim, step, both = panel.view(np.int16), t.dim, 16 * t.page, rows - first > 16
    for c in range(0, dim, 32):
        to, to_16 = first * dim + c, (first + 16) * dim + c
        tile_load(4, mixed, to, 4 * dim)
        tile_load(5, mixed, to + 16, 4 * dim)
        if both:
            tile_load(6, mixed, to_16, 4 * dim)
            tile_load(7, mixed, to_16 + 16, 4 * dim)
        for group in range(-(-tokens // GROUP)):
            if GROUP * (group + 1) <= tokens:
                value = at[64 + group] + c * t.page
                tile_load(2, cache, value, 64)
                tile_load(3, cache, value + step, 64)
            else:
                tile_load(2, last, 32 * c, 64)
                tile_load(3, last, 32 * c + 512, 64)
            tile_load(0, weights, GROUP * group, 2 * TILE)
            tile_multiply(4, 0, 2)
            tile_multiply(5, 0, 3)
            if both:
                tile_load(1, weights, 16 * TILE + GROUP * group, 2 * TILE)
                tile_multiply(6, 1, 2)
                tile_multiply(7, 1, 3)
        tile_store(4, mixed, to, 4 * dim)
        tile_store(5, mixed, to + 16, 4 * dim)
        if both:
            tile_store(6, mixed, to_16, 4 * dim)
            tile_store(7, mixed, to_16 + 16, 4 * dim)


@inner
def _value_tiles(t, cache, slab, offset, out):
    """A token's value in float32."""
    for c in range(t.dim // 16):
        base = slab + t.page * (t.dim + 16 * c) + offset // 2 * 32
        pairs, sixteen = cache[base : base + 32], out[16 * c : 16 * c + 16]
        for i in range(16):
            sixteen[i] = float_of(np.int32(pairs[2 * i + offset % 2]) << 16)


@inner
def _widen_bytes(t, cache, source, panel, target, count, step):
    """`count` runs of 32 float8 as float32, `step` numbers apart."""
    for run in range(count):
        bits = cache[source + run * step : source + run * step + GROUP]
        into = panel[target + run * GROUP : target + (run + 1) * GROUP]
        for i in range(GROUP):
            into[i] = widened(bits[i], t.cache_form)


@inner
def _place_vectors(t, cache, head, table, tile, tokens, with_values, work):
    """Find a tile of cached tokens whose keys lie channel by channel in float32, and bring others
    into that form."""
    _, _, _, _, panel, at = work
    dim, page, wide = t.dim, t.page, -(-t.dim // GROUP) * GROUP
    places = carray(pointer(t.places), (page, 2 * dim), np.int32)
    for group in range(-(-tokens // GROUP)):
        if t.by_channel:
            block, offset = divmod(tile + GROUP * group, page)
            slab = table[block] * t.cache_block + head * t.cache_head
            at[group], at[64 + group] = slab + offset, slab + page * dim + offset * dim
            if t.cache_form == 0:
                continue
        keys, values = at[group], at[64 + group]
        at[group], at[64 + group] = GROUP * dim * group, TILE * dim + GROUP * wide * group
        if t.by_channel and t.cache_form >= 3:
            _widen_bytes(t, cache, keys, panel, at[group], dim, page)
            if with_values:
                count = min(GROUP, tokens - GROUP * group) * (dim // GROUP)
                _widen_bytes(t, cache, values, panel, at[64 + group], count, GROUP)
            continue
        if t.by_channel and t.cache_form == 1:
            widen(cache, keys, panel, at[group], dim, page, GROUP)
            if with_values:
                count = min(GROUP, tokens - GROUP * group) * (dim // GROUP)
                widen(cache, values, panel, at[64 + group], count, GROUP, GROUP)
            continue
        for token in range(min(GROUP, tokens - GROUP * group)):
            block, offset = divmod(tile + GROUP * group + token, page)
            slab = table[block] * t.cache_block + head * t.cache_head
            for c in range(dim):
                number = widened(cache[slab + places[offset, c]], t.cache_form)
                panel[at[group] + GROUP * c + token] = number
            for c in range(dim if with_values else 0):
                number = widened(cache[slab + places[offset, dim + c]], t.cache_form)
                panel[at[64 + group] + wide * token + c] = number


@inner
def _score_vectors(t, floats, first, rows, tokens, work):
    """Scores [32, TILE] of rows from `first` on."""
    asked, _, scores, _, panel, at = work
    source, stride = (floats, t.page) if t.by_channel and t.cache_form == 0 else (panel, GROUP)
    for group in range(-(-tokens // GROUP)):
        for row in range(0, min(GROUP, rows - first), 8):
            multiply_8x32(
                asked, (first + row) * t.dim, t.dim, source, at[group], stride,
                scores, row * TILE + GROUP * group, TILE, t.dim, False,
            )  # fmt: skip


@inner
def _mix_vectors(t, floats, first, rows, tokens, mixed, work):
    """Add weights @ values of a tile to mixed, whose rows are padded to whole groups."""
    _, _, scores, _, panel, at = work
    wide = -(-t.dim // GROUP) * GROUP
    source = floats if t.by_channel and t.cache_form == 0 else panel
    for group in range(-(-tokens // GROUP)):
        length = min(GROUP, tokens - GROUP * group)
        for c in range(0, wide, GROUP):
            for row in range(0, min(GROUP, rows - first), 8):
                multiply_8x32(
                    scores, row * TILE + GROUP * group, TILE, source, at[64 + group] + c, wide,
                    mixed, (first + row) * wide + c, wide, length, True,
                )  # fmt: skip


@inner
def _value_vectors(t, cache, slab, offset, out):
    """A token's value in float32."""
    if t.by_channel:
        row = cache[slab + t.dim * (t.page + offset) : slab + t.dim * (t.page + offset + 1)]
        for c in range(t.dim):
            out[c] = widened(row[c], t.cache_form)
        return
    places = carray(pointer(t.places), (t.page, 2 * t.dim), np.int32)
    for c in range(t.dim):
        out[c] = widened(cache[slab + places[offset, t.dim + c]], t.cache_form)


@inner
def place(t, cache, head, table, tile, tokens, with_values, work):
    if t.matrix:
        _place_tiles(t, cache, head, table, tile, tokens, with_values, work)
    else:
        _place_vectors(t, cache, head, table, tile, tokens, with_values, work)


@inner
def score(t, cache, floats, first, rows, tokens, work):
    if t.matrix:
        _score_tiles(t, cache, first, rows, tokens, work)
    else:
        _score_vectors(t, floats, first, rows, tokens, work)


@inner
def mix(t, cache, floats, first, rows, tokens, mixed, work):
    if t.matrix:
        _mix_tiles(t, cache, first, rows, tokens, mixed, work)
    else:
        _mix_vectors(t, floats, first, rows, tokens, mixed, work)


@inner
def value(t, cache, slab, offset, out):
    if t.matrix:
        _value_tiles(t, cache, slab, offset, out)
    else:
        _value_vectors(t, cache, slab, offset, out)
