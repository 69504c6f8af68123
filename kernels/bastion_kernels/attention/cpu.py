# SPDX-License-Identifier: Apache-2.0
"""Tree attention on a CPU: PyTorch's flash attention over the context, and a tail row by row.

A request's rows of this step see all rows cached before them. That part is dense: its keys and
values are gathered to contiguous scratch, one or a few key heads at a time so that they are still
in the CPU's cache when they are read, and the rows of all query heads that share a key head go into
one product. The step's own rows are few and sparse, an ancestor or a prefix each: Numba scores just
those in fp32 and merges them with the context's result by its log-sum-exp. A prompt's chunk is
dense and causal, so it is flash attention as well.

A node's ancestors are added in the order of their depth, in which the same path has its rows as a
chain, so that both give the same bits.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from bastion_kernels.native import njit, scratch

__all__ = ["SHIFTS", "tree_attention_cpu", "write_kv_cpu"]

_SHORT_CHUNK = 16  # a causal run of at most so many rows is a chain, by Numba
_COLUMNS = 2**15  # cached rows gathered at once
_IN_CACHE = 2**20  # bytes of keys and values that need no division by heads
_Q_BLOCK = 32  # rows of flash attention's unit of work, for short queries

# How far to the left a number's bits are those of the same number in fp32: the dtypes served here.
SHIFTS = {torch.float32: 0, torch.bfloat16: 16}
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@njit
def _write(key, value, cache, slots):
    page, dim = cache.shape[2], key.shape[2]
    for row in range(slots.shape[0]):
        if slots[row] >= 0:
            block, offset = divmod(slots[row], page)
            for head in range(key.shape[1]):
                for i in range(dim):
                    cache[block, head, offset, i] = key[row, head, i]
                for i in range(dim):
                    cache[block, head, offset, dim + i] = value[row, head, i]


_INTEGERS = {2: torch.int16, 4: torch.int32}


def write_kv_cpu(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Row by row; see `write_kv`."""
    kind = _INTEGERS[kv_cache.element_size()]
    _write(
        key.view(kind).numpy(), value.view(kind).numpy(), kv_cache.view(kind).numpy(),
        slot_mapping.numpy(),
    )  # fmt: skip


# The terms of a product may be added in any order, as it is the same for every row and column.
@partial(njit, fastmath={"reassoc", "contract", "nsz"})
def _dot(a, i, b, j):
    total = np.float32(0.0)
    for c in range(a.shape[1]):
        total += a[i, c] * b[j, c]
    return total


@njit
def _widen(cache, block, head, offset, first, shift, out, row):
    """Bits of a cached row's fp32 numbers, from integers of the cache's own width."""
    for c in range(out.shape[1]):
        out[row, c] = np.int32(cache[block, head, offset, first + c]) << shift


@njit
def _tail(query, cache, blocks, cached, bits, shift, scale, context, log_mass, out):
    """Rows of a tail over their ancestors, merged with the context's result.

    query: [n, Hq, d] and cache: [blocks, Hkv, block_size, 2d] as integers, which `shift` makes the
    bits of fp32; bits: [>= n, W], or [0, 0] for a chain; context: [Hkv, G * n, d] fp32 and log_mass
    [Hkv, G * n] fp32, -inf where there is no context; out: [n, Hq, d] fp32.
    """
    rows, heads, dim = query.shape
    kv_heads, page = cache.shape[1], cache.shape[2]
    group = heads // kv_heads
    scores = np.empty(rows, np.float32)
    seen = np.empty(rows, np.int64)
    key_bits, value_bits = np.empty((rows, dim), np.int32), np.empty((rows, dim), np.int32)
    query_bits, mixed = np.empty((1, dim), np.int32), np.empty(dim, np.float32)
    keys, values = key_bits.view(np.float32), value_bits.view(np.float32)
    asking = query_bits.view(np.float32)
    for kv_head in range(kv_heads):
        for row in range(rows):
            block, offset = divmod(cached + row, page)
            _widen(cache, blocks[block], kv_head, offset, 0, shift, key_bits, row)
            _widen(cache, blocks[block], kv_head, offset, dim, shift, value_bits, row)
        for row in range(rows):
            count = 0
            for node in range(row + 1):
                if bits.shape[0] == 0 or node == row or (bits[row, node >> 5] >> (node & 31)) & 1:
                    seen[count] = node
                    count += 1
            for member in range(group):
                head, at = kv_head * group + member, member * rows + row
                for c in range(dim):
                    query_bits[0, c] = np.int32(query[row, head, c]) << shift
                top = log_mass[kv_head, at]
                for i in range(count):
                    scores[i] = scale * _dot(asking, 0, keys, seen[i])
                    top = max(top, scores[i])
                weight = np.float32(math.exp(log_mass[kv_head, at] - top))
                total = weight
                for c in range(dim):
                    mixed[c] = weight * context[kv_head, at, c]
                for i in range(count):
                    weight, node = np.float32(math.exp(scores[i] - top)), seen[i]
                    total += weight
                    for c in range(dim):
                        mixed[c] += weight * values[node, c]
                for c in range(dim):
                    out[row, head, c] = mixed[c] / total


def _heads_at_once(kv_heads: int, rows: int, row_bytes: int, columns: int) -> int:
    """Key heads of one call: few enough for the CPU's cache, enough to keep all threads busy."""
    if kv_heads * columns * row_bytes <= _IN_CACHE:
        return kv_heads
    units = -(-rows // _Q_BLOCK)
    return min(kv_heads, -(-2 * torch.get_num_threads() // (units + 1)))


def _context(
    query: Tensor, by_head: Tensor, blocks: Tensor, length: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of rows that all see the first `length` cached rows.

    query: [Hkv, M, d]; by_head: [Hkv, blocks, block_size, 2d]. Returns [Hkv, M, d] and the log-sum-
    exp [Hkv, M] fp32.
    """
    kv_heads, rows, dim = query.shape
    size, width = by_head.shape[2:]
    result, mass = query.new_empty(query.shape), torch.empty(kv_heads, rows)
    heads = _heads_at_once(kv_heads, rows, width * query.element_size(), length)
    for first in range(0, kv_heads, heads):
        some = slice(first, min(first + heads, kv_heads))
        for start in range(0, length, _COLUMNS):
            end = min(start + _COLUMNS, length)
            ids = blocks[start // size : -(-end // size)]
            kv = scratch(by_head.dtype, some.stop - first, ids.shape[0], size, width)
            for head, blocks_of_head in zip(kv, by_head[some]):
                # head by head, as PyTorch is several times slower along an inner dimension
                torch.index_select(blocks_of_head, 0, ids, out=head)
            kv = kv.flatten(1, 2)[None, :, start % size : start % size + end - start]
            out, log_mass = _flash(
                query[some][None], kv[..., :dim], kv[..., dim:], 0.0, False, scale=scale
            )
            if start == 0:
                result[some], mass[some] = out[0], log_mass[0]
            else:
                _merge(result[some], mass[some], out[0], log_mass[0])
    return result, mass


def _merge(result: Tensor, mass: Tensor, other: Tensor, other_mass: Tensor) -> None:
    """Put two parts of the columns together, in place: results [.., d], log-sum-exps [..]."""
    weight = torch.sigmoid(other_mass - mass)[..., None]
    result.copy_(torch.lerp(result.float(), other.float(), weight))
    torch.logaddexp(mass, other_mass, out=mass)


def _rows(
    query: Tensor,
    kv_cache: Tensor,
    blocks: Tensor,
    length: int,
    bits: Tensor | None,
    scale: float,
    out: Tensor,
) -> None:
    """The last rows of a request: a tree given by its bits, or causal. query, out: [q, Hq, d]."""
    count, heads, dim = query.shape
    _, kv_heads, size, _ = kv_cache.shape
    by_head, group, cached = kv_cache.transpose(0, 1), heads // kv_heads, length - count
    # [Hkv, G, q, d]
    split = query.unflatten(1, (kv_heads, group)).permute(1, 2, 0, 3)
    if count == 1:
        result, _ = _context(split.flatten(1, 2), by_head, blocks, length, scale)
        out.copy_(result.view(1, heads, dim))
        return
    if cached:
        result, mass = _context(split.reshape(kv_heads, -1, dim), by_head, blocks, cached, scale)
    if bits is not None or count <= _SHORT_CHUNK:
        if not cached:
            result = torch.zeros(kv_heads, group * count, dim)
            mass = torch.full((kv_heads, group * count), -torch.inf)
        merged, kind = torch.empty(count, heads, dim), _INTEGERS[query.element_size()]
        _tail(
            query.view(kind).numpy(), kv_cache.view(kind).numpy(), blocks.numpy(), cached,
            _NO_BITS if bits is None else bits.numpy(), SHIFTS[query.dtype], np.float32(scale),
            result.float().numpy(), mass.numpy(), merged.numpy(),
        )  # fmt: skip
        out.copy_(merged)
        return
    places = torch.arange(cached, length)
    own = kv_cache[blocks[places // size], :, places % size]
    shape = (kv_heads, group, count, dim)
    keys, values = (x.transpose(0, 1)[:, None].expand(shape) for x in own.split(dim, 2))
    causal, causal_mass = _flash(split, keys, values, 0.0, True, scale=scale)
    if cached:
        _merge(result.view(shape), mass.view(shape[:3]), causal, causal_mass)
        causal = result.view(shape)
    out.copy_(causal.permute(2, 0, 1, 3).reshape(count, heads, dim))


_NO_BITS = np.empty((0, 0), np.int32)


def tree_attention_cpu(
    query: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    tail_lens: Tensor,
    slots: Tensor,
    ancestor_bits: Tensor,
    scale: float,
    out: Tensor,
) -> None:
    """Request by request; see `tree_attention`. No softcap, a cache of the queries' dtype."""
    size = kv_cache.shape[2]
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    tails, rows_of_bits = tail_lens.tolist(), slots.tolist()
    for r, (first, last) in enumerate(pairwise(starts)):
        if first == last:
            continue
        blocks = block_table[r, : -(-lengths[r] // size)]
        tail = tails[r] if rows_of_bits[r] >= 0 and tails[r] > 1 else 0
        if last - tail > first:
            part = slice(first, last - tail)
            _rows(query[part], kv_cache, blocks, lengths[r] - tail, None, scale, out[part])
        if tail:
            part, bits = slice(last - tail, last), ancestor_bits[rows_of_bits[r]]
            _rows(query[part], kv_cache, blocks, lengths[r], bits, scale, out[part])
