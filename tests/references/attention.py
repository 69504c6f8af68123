# SPDX-License-Identifier: Apache-2.0
"""Masks and positions of trees, and attention over them."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from bastion_kernels import AttentionLayer, AttentionStep
from bastion_kernels.attention.mask import AncestorBits, TreePositions
from tests.references.declare import of
from tests.references.kv_layout import unpacked

# Accumulating one precision above the input makes the rounded result independent of the order of a
# node's ancestors in the tail: a tree row equals the same path as a chain.
_MATH = {torch.float32: torch.float64, torch.float64: torch.float64}


@of(AncestorBits)
def ancestor_bits(op: AncestorBits) -> None:
    """A node's bits are its parent's and its own."""
    words = op.out.shape[2]
    for slot in op.slots.tolist():
        if slot < 0:
            continue
        bits = [1]
        for node, parent in enumerate(op.parents[slot].tolist(), start=1):
            bits.append(bits[parent] | 1 << node if 0 <= parent < node else 0)
        raw = b"".join(mask.to_bytes(4 * words, "little") for mask in bits)
        op.out[slot] = torch.frombuffer(bytearray(raw), dtype=torch.int32).view(-1, words)


@of(TreePositions)
def tree_positions(op: TreePositions) -> None:
    """Copy the linear positions, then overwrite the tails."""
    if op.out.data_ptr() != op.positions.data_ptr():
        op.out.copy_(op.positions)
    starts, tails = op.query_start_loc.tolist(), op.tail_lens.tolist()
    for r, slot in enumerate(op.slots.tolist()):
        tail = tails[r]
        if slot >= 0 and tail > 1:
            root = starts[r + 1] - tail
            op.out[root + 1 : root + tail] = op.positions[root] + op.depths[slot, : tail - 1]


def visible_rows(
    q: int, length: int, tail: int, bits: Tensor, window: int = 0, depths: Tensor | None = None
) -> Tensor:
    """`[q, length]` bool: the cached rows that each of a request's last q rows sees.

    Args:
        length: cached rows of the request.
        tail: the last rows, a root and its nodes; at most 1 = causal only.
        bits: `[>= tail, W]` int32, ancestor bits of the request.
        window: a row sees only rows less than this many positions before its own; 0 = all.
        depths: `[N]` int32, depth of each draft node; needed with a window.
    """
    columns = torch.arange(length, device=bits.device)
    seen = columns <= columns[length - q :, None]
    if tail > 1:
        shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
        ancestors = ((bits[:tail, :, None] >> shifts) & 1).flatten(1)[:, :tail].bool()
        itself = torch.eye(tail, dtype=torch.bool, device=bits.device)
        seen[q - tail :, length - tail :] = ancestors | itself
    if window:
        positions = columns.clone()
        if tail > 1:
            assert depths is not None
            positions[length - tail + 1 :] = length - tail + depths[: tail - 1]
        seen &= positions[length - q :, None] - positions < window
    return seen


def _mix(weights: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    """`weights @ values`; what a row does not see counts as zero there, be it NaN or infinite.

    weights: `[Hkv, q, group, L]`; values: `[Hkv, L, d]`; seen: `[q, L]`.
    """
    finite = values.where(values.isfinite(), 0)
    out = torch.einsum("hqgl,hld->hqgd", weights, finite)
    for column in (~values.isfinite()).any(2).any(0).nonzero().flatten().tolist():
        rest = (values - finite)[:, None, None, column]
        out += (weights[..., column, None] * rest).where(seen[:, None, column, None], 0)
    return out


def tree_attention(layer: AttentionLayer, step: AttentionStep, query: Tensor, out: Tensor) -> None:
    """A layer's call, one request at a time and one precision up."""
    cache = unpacked(layer.kv_cache, layer.layout)
    math = _MATH.get(out.dtype, torch.float32)
    of_query, of_key, of_value = (
        1.0 if scale is None else scale.to(math)
        for scale in (layer.q_scale, layer.k_scale, layer.v_scale)
    )
    (heads, dim), (kv_heads, size) = query.shape[1:], cache.shape[1:3]
    tails, slots = step.tail_lens.tolist(), step.slots.tolist()
    for r, (first, last) in enumerate(pairwise(step.query_start_loc.tolist())):
        q, length, slot = last - first, int(step.seq_lens[r]), slots[r]
        if q == 0:
            continue
        # blocks before the first row's window may be another request's by now
        skipped = max(0, length - q - layer.window + 1) // size if layer.window else 0
        blocks = step.block_table[r, skipped : -(-length // size)].long()
        length -= skipped * size
        kv = cache.transpose(0, 1)[:, blocks].flatten(1, 2)[:, :length].to(math)  # [Hkv, L, 2d]
        keys, values = kv[..., :dim] * (layer.scale * of_query * of_key), kv[..., dim:] * of_value
        tail = tails[r] if slot >= 0 else 0
        depths = None if step.depths is None else step.depths[slot]
        seen = visible_rows(q, length, tail, step.ancestor_bits[slot], layer.window, depths)
        rows = query[first:last].to(math).view(q, kv_heads, -1, dim)
        scores = torch.einsum("qhgd,hld->hqgl", rows, keys)
        if layer.softcap > 0:
            scores = layer.softcap * torch.tanh(scores / layer.softcap)
        scores = scores.masked_fill(~seen[:, None], float("-inf"))
        if layer.sinks is not None:
            sinks = layer.sinks.to(math).view(kv_heads, 1, -1, 1)
            scores = torch.cat([scores, sinks.expand(*scores.shape[:3], 1)], 3)
        mixed = _mix(scores.softmax(-1)[..., :length], values, seen)
        out[first:last] = mixed.transpose(0, 1).reshape(q, heads, dim).to(out.dtype)
