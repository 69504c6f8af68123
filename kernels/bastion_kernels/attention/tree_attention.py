# SPDX-License-Identifier: Apache-2.0
"""Attention of a mixed batch (prefill chunks, plain rows, chains, trees) over a paged KV cache.

For the query row at place p of request r (L = seq_lens[r] rows in the cache, the last q of them
this step's, the last n of these a tail of root and draft nodes):

    out[p] = softmax(cap(scale * query[p] @ K[visible].T)) @ V[visible]
    visible = { rows <= p }                                        outside the tail
    visible = { rows < L - n } + { tail row j : bit j of p's node }   inside it
    cap(s) = softcap * tanh(s / softcap)                           when softcap > 0

`ancestor_bits` has the bits of a node's ancestors and of itself. A chain's bits are causal, so a
chain and a tree take the same path. Of the visible rows, those stay that are less than `window`
positions before p; a node's position is its root's and its depth. A sink is one more score of a
head, uncapped, whose value is zero.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from bastion_kernels.attention.kernels import tree_attention_kernel
from bastion_kernels.attention.kv_layout import KVLayout
from bastion_kernels.attention.plan import RUN_FIELDS
from bastion_kernels.attention.workspace import TreeAttentionWorkspace
from bastion_kernels.checks import check, on_gpu
from bastion_kernels.cpu.attention import serves, tree_attention_cpu
from bastion_kernels.cpu.native import HAVE_NUMBA

__all__ = [
    "TreeAttentionWorkspace",
    "tree_attention",
    "tree_attention_reference",
    "tree_attention_triton",
]

# Accumulating one precision above the input makes the rounded result independent of where a node's
# ancestors lie among the tail's rows: a tree row gives what the same path gives as a chain.
_MATH = {torch.float32: torch.float64, torch.float64: torch.float64}
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# rows of one request that are scored at once, to bound the memory of a long prefill chunk
_ROW_CHUNK = 256
# partial results in flight while they are merged, plus one
_MERGE_STAGES = 3


def _visible(
    q: int, length: int, tail: int, bits: Tensor, window: int, depths: Tensor | None
) -> Tensor:
    """`[q, length]` bool: which cached rows each of a request's last q rows sees."""
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


def tree_attention_reference(
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
    *,
    softcap: float = 0.0,
    window: int = 0,
    sinks: Tensor | None = None,
    depths: Tensor | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """The definition, in plain PyTorch and one precision up; see `tree_attention`."""
    math = _MATH.get(out.dtype, torch.float32)
    factor: Tensor | float = scale if q_scale is None else scale * q_scale.to(math)
    heads, dim = query.shape[1:]
    kv_heads, size = kv_cache.shape[1:3]
    starts, lengths, tails = query_start_loc.tolist(), seq_lens.tolist(), tail_lens.tolist()
    rows_of_bits = slots.tolist()
    by_head = kv_cache.transpose(0, 1)
    for r, (first, last) in enumerate(pairwise(starts)):
        q, length, slot = last - first, lengths[r], rows_of_bits[r]
        if q == 0:
            continue
        # blocks before the first row's window may be another request's by now
        skipped = max(0, length - q - window + 1) // size if window else 0
        blocks = block_table[r, skipped : -(-length // size)].long()
        length -= skipped * size
        # [Hkv, L, 2d]
        kv = by_head[:, blocks].flatten(1, 2)[:, :length].to(math)
        keys = kv[..., :dim] * (factor if k_scale is None else factor * k_scale.to(math))
        values = kv[..., dim:] if v_scale is None else kv[..., dim:] * v_scale.to(math)
        tail = tails[r] if slot >= 0 else 0
        of_slot = None if depths is None else depths[slot]
        seen = _visible(q, length, tail, ancestor_bits[slot], window, of_slot)
        for low in range(0, q, _ROW_CHUNK):
            high = min(low + _ROW_CHUNK, q)
            # [Hkv, rows * group, d]: the heads that share a key head are extra rows
            rows = query[first + low : first + high].to(math)
            packed = rows.view(high - low, kv_heads, -1, dim).transpose(0, 1).flatten(1, 2)
            scores = packed @ keys.transpose(1, 2)
            if softcap > 0:
                scores = softcap * torch.tanh(scores / softcap)
            grouped = scores.view(kv_heads, high - low, -1, length)
            grouped.masked_fill_(~seen[low:high, None], float("-inf"))
            if sinks is not None:
                sink = sinks.to(math).view(kv_heads, 1, -1, 1).expand(*grouped.shape[:3], 1)
                grouped = torch.cat([grouped, sink], 3)
            mixed = grouped.softmax(-1)[..., :length].flatten(1, 2) @ values
            mixed = mixed.view(kv_heads, high - low, -1, dim).transpose(0, 1)
            out[first + low : first + high] = mixed.reshape(-1, heads, dim).to(out.dtype)


def tree_attention_triton(
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
    *,
    softcap: float = 0.0,
    window: int = 0,
    sinks: Tensor | None = None,
    depths: Tensor | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    workspace: TreeAttentionWorkspace,
) -> None:
    """The Triton kernel, for a step that `workspace` has planned; see `tree_attention`."""
    log2_e = 1.4426950408889634
    tree_attention_kernel[(workspace.programs,)](
        query,
        kv_cache,
        block_table,
        query_start_loc,
        seq_lens,
        tail_lens,
        slots,
        ancestor_bits,
        depths,
        sinks,
        q_scale,
        k_scale,
        v_scale,
        out,
        workspace.header,
        workspace.bundles,
        workspace.runs,
        workspace.partial,
        workspace.partial_stats,
        workspace.arrived,
        scale * log2_e * (2 / softcap if softcap else 1),
        softcap * log2_e,
        *query.stride(),
        *out.stride(),
        *kv_cache.stride(),
        block_table.stride(0),
        *ancestor_bits.stride(),
        ancestor_bits.shape[2],
        0 if depths is None else depths.stride(0),
        KV_HEADS=workspace.kv_heads,
        GROUP=workspace.group,
        DIM=workspace.head_dim,
        BLOCK_D=workspace.block_d,
        BLOCK_Q=workspace.block_q,
        BLOCK_M=workspace.tiles.block_m,
        BLOCK_N=workspace.tiles.block_n,
        PAGE=kv_cache.shape[2],
        SOFTCAP=softcap > 0,
        WINDOW=window,
        MAX_TAIL=workspace.max_tail,
        STAGES=workspace.tiles.stages,
        MERGE_STAGES=_MERGE_STAGES,
        RUN_FIELDS=RUN_FIELDS,
        num_warps=workspace.tiles.num_warps,
        # the default until Triton 3.10
        enable_fp_fusion=True,
    )


def _check(
    query: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    ancestor_bits: Tensor,
    out: Tensor,
    softcap: float,
    window: int,
    sinks: Tensor | None,
    depths: Tensor | None,
    workspace: TreeAttentionWorkspace | None,
) -> None:
    heads, dim = query.shape[1:]
    if window < 0:
        raise ValueError(f"tree_attention: window must be >= 0, got {window}")
    if window:
        wanted = (ancestor_bits.shape[0], ancestor_bits.shape[1] - 1)
        if depths is None:
            raise ValueError("tree_attention: a window counts positions, which need depths")
        check("tree_attention", "depths", depths, wanted, torch.int32)
    if sinks is not None:
        check("tree_attention", "sinks", sinks, (heads,), torch.float32)
    if kv_cache.dim() != 4 or kv_cache.shape[3] != 2 * dim or heads % kv_cache.shape[1]:
        raise ValueError(
            "tree_attention: kv_cache must be [blocks, Hkv, block_size, 2d] with Hkv dividing the "
            f"query heads, got {tuple(kv_cache.shape)} for queries {tuple(query.shape)}"
        )
    if kv_cache.dtype not in (out.dtype, *_FLOAT8) or query.dtype not in (out.dtype, _FLOAT8[0]):
        raise ValueError(
            f"tree_attention: a {kv_cache.dtype} cache and {query.dtype} queries do not go with a "
            f"result of {out.dtype}; they must be of its dtype or a float8 (view bytes as that)"
        )
    if out.shape != query.shape or block_table.shape[0] + 1 < query_start_loc.shape[0]:
        raise ValueError(
            f"tree_attention: shapes do not fit: query {tuple(query.shape)}, out "
            f"{tuple(out.shape)}, block_table {tuple(block_table.shape)}, query_start_loc "
            f"{tuple(query_start_loc.shape)}"
        )
    if softcap < 0:
        raise ValueError(f"tree_attention: softcap must be >= 0, got {softcap}")
    if workspace is not None and (
        query.shape[0] > workspace.max_rows
        or heads != workspace.kv_heads * workspace.group
        or kv_cache.shape[1] != workspace.kv_heads
        or dim != workspace.head_dim
        or out.dtype != workspace.dtype
        or window != workspace.window
        or (window and ancestor_bits.shape[1] > workspace.max_tail)
    ):
        raise ValueError(
            f"tree_attention: queries {tuple(query.shape)} for {out.dtype}, "
            f"{kv_cache.shape[1]} key heads, a window of {window} and tails of up to "
            f"{ancestor_bits.shape[1]} rows do not fit the workspace"
        )


def tree_attention(
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
    *,
    softcap: float = 0.0,
    window: int = 0,
    sinks: Tensor | None = None,
    depths: Tensor | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    layout: KVLayout | None = None,
    workspace: TreeAttentionWorkspace | None = None,
) -> None:
    """Attention of every row of the step over its request's cached rows.

    A row always sees itself, whatever its bits.

    Args:
        query: `[T, Hq, d]`, any strides, of the result's dtype or float8_e4m3fn; rows from
            `query_start_loc[R]` on are not read.
        kv_cache: `[blocks, Hkv, block_size, 2d]`, any strides, of the result's dtype or a float8;
            this step's rows already written.
        block_table: `[>= R, *]` int32; entries past a request's length are not read.
        query_start_loc: `[R+1]` int32. A request without rows (padding) writes nothing.
        seq_lens: `[R]` int32, cached rows of the request, this step's included.
        tail_lens: `[R]` int32, rows of the request's tail (root and nodes); 0 = causal only.
        slots: `[R]` int64, the request's row of `ancestor_bits`; -1 = causal only.
        ancestor_bits: `[S, N+1, W]` int32, bit j of node i set iff j is i or its ancestor.
        scale: factor of the scores.
        out: `[T, Hq, d]`, written; rows from `query_start_loc[R]` on are left as they are.
        softcap: cap of the scores, 0 = none.
        window: a row at position q sees one at position p only if q - p < window; 0 = none.
        sinks: `[Hq]` float32, a score of each head that takes part in its softmax.
        depths: `[S, N]` int32, depth of each draft node; needed for a window.
        q_scale: `[1]` float32, factor of float8 queries.
        k_scale, v_scale: `[1]` float32, factors of a float8 cache's keys and values.
        layout: how the blocks of a CPU's cache are packed; None = in rows, as above.
        workspace: buffers already planned for this step (`TreeAttentionWorkspace.plan`), needed
            inside a CUDA graph. Without them the CUDA path allocates and plans by itself. The
            CPU path needs none.

    Raises:
        ValueError, TypeError: shapes, dtypes or workspace do not fit together.
    """
    _check(
        query, kv_cache, block_table, query_start_loc, ancestor_bits, out, softcap, window, sinks,
        depths, workspace,
    )  # fmt: skip
    args = (
        query, kv_cache, block_table, query_start_loc, seq_lens, tail_lens, slots, ancestor_bits,
        scale, out,
    )  # fmt: skip
    if not on_gpu(query):
        if HAVE_NUMBA and serves(query.dtype, kv_cache.dtype):
            tree_attention_cpu(
                *args, softcap=softcap, window=window, sinks=sinks, depths=depths, k_scale=k_scale,
                v_scale=v_scale, layout=layout,
            )  # fmt: skip
            return
        if layout is not None:
            args = (query, layout.read(kv_cache), *args[2:])
        tree_attention_reference(
            *args, softcap=softcap, window=window, sinks=sinks, depths=depths, q_scale=q_scale,
            k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip
        return
    if workspace is None:
        workspace = TreeAttentionWorkspace(
            query.shape[1], kv_cache.shape[1], query.shape[2], out.dtype,
            max(1, query.shape[0]), max(1, seq_lens.shape[0]), query.device, window=window,
            max_tail=ancestor_bits.shape[1],
        )  # fmt: skip
        workspace.plan(query_start_loc, seq_lens)
    tree_attention_triton(
        *args, softcap=softcap, window=window, sinks=sinks, depths=depths, q_scale=q_scale,
        k_scale=k_scale, v_scale=v_scale, workspace=workspace,
    )  # fmt: skip
