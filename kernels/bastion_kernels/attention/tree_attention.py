# SPDX-License-Identifier: Apache-2.0
"""Attention of a mixed batch (prefill chunks, plain rows, chains, trees) over a paged KV cache.

For the query row at place p of request r (L = seq_lens[r] rows in the cache, the last q of them
this step's, the last n of these a tail of root and draft nodes):

    out[p] = softmax(cap(scale * query[p] @ K[visible].T)) @ V[visible]
    visible = { rows <= p }                                        outside the tail
    visible = { rows < L - n } + { tail row j : bit j of p's node }   inside it
    cap(s) = softcap * tanh(s / softcap)                           when softcap > 0

`ancestor_bits` has the bits of a node's ancestors and its own. A chain's bits are causal, so chains
and trees need no distinction. With a window, a row sees only rows less than `window` positions
before its own; a node's position is its root's plus its depth. A sink is an additional, uncapped
score of a head; its value is zero.

`AttentionStep` has the arguments common to all layers of a step, `AttentionLayer` those common to
all steps of a layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bastion_kernels.attention.kernels import tree_attention_kernel
from bastion_kernels.attention.kv_layout import KVLayout
from bastion_kernels.attention.plan import BUNDLE_FIELDS, RUN_FIELDS
from bastion_kernels.attention.workspace import TreeAttentionWorkspace
from bastion_kernels.checks import check, declared
from bastion_kernels.op import load

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# What the tensors of a call must be.
_DECLARED = {
    "query": declared("[T, HEADS, DIM], strided"),
    "out": declared("[T, HEADS, DIM], strided"),
    "kv_cache": declared("[*, *, *, 2 * DIM], strided"),
    "block_table": declared("[>= R, *]"),
    "sinks": declared("[HEADS] float32"),
    "depths": declared("[S, N] int32"),
}
# partial results in flight while they are merged, plus one
_MERGE_STAGES = 3


@dataclass(slots=True)
class AttentionStep:
    """The requests of a step. Every call of a layer reads the tensors."""

    block_table: Tensor
    """`[>= R, *]` int32; entries past a request's length are not read."""
    query_start_loc: Tensor
    """`[R+1]` int32. A request without rows (padding) writes nothing."""
    seq_lens: Tensor
    """`[R]` int32, cached rows of the request, this step's included."""
    tail_lens: Tensor
    """`[R]` int32, rows of the request's tail (root and nodes); 0 = causal only."""
    slots: Tensor
    """`[R]` int64, the request's row of `ancestor_bits`; -1 = causal only."""
    ancestor_bits: Tensor
    """`[S, N+1, W]` int32, bit j of node i set iff j is i or its ancestor."""
    depths: Tensor | None = None
    """`[S, N]` int32, depth of each draft node; needed by layers with a window."""
    workspaces: Mapping[int, TreeAttentionWorkspace] | None = None
    """Buffers already planned for this step (`TreeAttentionWorkspace.plan`), by the layers' window.
    Required in a CUDA graph. None: every call on a GPU allocates and plans. Unused on a CPU."""
    native: Any = field(default=None, init=False, repr=False, compare=False)
    """The C++ kernel's view of the above, made by the first call on a CPU."""
    checked: bool = field(default=False, init=False, repr=False, compare=False)
    """Whether a layer's call has checked it; the layers of a model share their sizes."""


@dataclass(slots=True)
class AttentionLayer:
    """An attention layer and its cache. Calling it computes attention for every row of a step.

    A row always sees itself, even if its bit is 0.
    """

    kv_cache: Tensor
    """`[blocks, Hkv, block_size, 2d]`, any strides, of the result's dtype or a float8."""
    scale: float
    """Factor of the scores."""
    softcap: float = 0.0
    """Cap of the scores, 0 = none."""
    window: int = 0
    """A row at position q sees one at position p only if q - p < window; 0 = none."""
    sinks: Tensor | None = None
    """`[Hq]` float32, a score of each head that takes part in its softmax."""
    q_scale: Tensor | None = None
    """`[1]` float32, factor of float8 queries."""
    k_scale: Tensor | None = None
    """`[1]` float32, factor of a float8 cache's keys."""
    v_scale: Tensor | None = None
    """`[1]` float32, factor of a float8 cache's values."""
    layout: KVLayout | None = None
    """How the blocks of a CPU's cache are packed; None = in rows, as above."""
    native: Any = field(default=None, init=False, repr=False, compare=False)
    """The C++ kernel's view of the above, made by the first call on a CPU."""

    def __call__(self, step: AttentionStep, query: Tensor, out: Tensor) -> None:
        """Attention of the rows of `query` over the cached rows of their requests.

        Args:
            step: its rows are already in the cache.
            query: `[T, Hq, d]`, any strides, of the result's dtype or float8_e4m3fn; rows from
                `query_start_loc[R]` on are not read.
            out: `[T, Hq, d]`, written; rows from `query_start_loc[R]` on are left as they are.

        Raises:
            ValueError, TypeError: shapes, dtypes or workspace do not fit together.
        """
        if not step.checked:
            self.check(step, query, out)
            step.checked = True
        if query.is_cuda:
            self.triton(step, query, out)
        else:
            self.cpu(step, query, out)

    def check(self, step: AttentionStep, query: Tensor, out: Tensor) -> None:
        """Raise unless layer, step, queries and result fit together."""
        name, cache, window = "tree_attention", self.kv_cache, self.window
        slots, tail, _ = step.ancestor_bits.shape
        values = query, out, cache, step.block_table, self.sinks, step.depths
        sizes = {"R": step.query_start_loc.shape[0] - 1, "S": slots, "N": tail - 1}
        check(name, tuple(_DECLARED), values, tuple(_DECLARED.values()), **sizes)
        if min(window, self.softcap) < 0:
            raise ValueError(f"{name}: window and softcap must be >= 0")
        if window and step.depths is None:
            raise ValueError(f"{name}: a window counts positions, which need depths")
        heads, kv_heads = query.shape[1], cache.shape[1]
        if heads % kv_heads:
            raise ValueError(f"{name}: {heads} heads over {kv_heads} key heads")
        if cache.dtype not in (out.dtype, *_FLOAT8) or query.dtype not in (out.dtype, _FLOAT8[0]):
            raise ValueError(
                f"{name}: a {cache.dtype} cache and {query.dtype} queries do not go with a "
                f"result of {out.dtype}; they must be of its dtype or a float8 (view bytes as that)"
            )
        workspace = None if step.workspaces is None else step.workspaces[window]
        if workspace is not None and (
            query.shape[0] > workspace.max_rows
            or (heads, kv_heads) != (kv_heads * workspace.group, workspace.kv_heads)
            or (query.shape[2], out.dtype) != (workspace.head_dim, workspace.dtype)
            or (window and tail > workspace.max_tail)
        ):
            raise ValueError(
                f"{name}: queries {tuple(query.shape)} for {out.dtype}, {kv_heads} key "
                f"heads and tails of up to {tail} rows do not fit the workspace"
            )

    def triton(self, step: AttentionStep, query: Tensor, out: Tensor) -> None:
        """Launch the Triton kernel; plan first if the step has no workspaces."""
        kv_cache, softcap, depths = self.kv_cache, self.softcap, step.depths
        if step.workspaces is not None:
            workspace = step.workspaces[self.window]
        else:
            workspace = TreeAttentionWorkspace(
                query.shape[1], kv_cache.shape[1], query.shape[2], out.dtype,
                max(1, query.shape[0]), max(1, step.seq_lens.shape[0]), query.device,
                window=self.window, max_tail=step.ancestor_bits.shape[1],
            )  # fmt: skip
            workspace.plan(step.query_start_loc, step.seq_lens)
        log2_e = 1.4426950408889634
        tree_attention_kernel[(workspace.programs,)](
            query=query,
            kv_cache=kv_cache,
            block_table=step.block_table,
            tail_lens=step.tail_lens,
            slots=step.slots,
            ancestor_bits=step.ancestor_bits,
            depths=depths,
            sinks=self.sinks,
            q_scale=self.q_scale,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
            out=out,
            header=workspace.header,
            bundles=workspace.bundles,
            runs=workspace.runs,
            partial=workspace.partial,
            partial_stats=workspace.partial_stats,
            arrived=workspace.arrived,
            score_scale=self.scale * log2_e * (2 / softcap if softcap else 1),
            softcap=softcap * log2_e,
            stride_query_row=query.stride(0),
            stride_query_head=query.stride(1),
            stride_query_col=query.stride(2),
            stride_out_row=out.stride(0),
            stride_out_head=out.stride(1),
            stride_out_col=out.stride(2),
            stride_table=step.block_table.stride(0),
            stride_bits_slot=step.ancestor_bits.stride(0),
            stride_bits_node=step.ancestor_bits.stride(1),
            stride_bits_word=step.ancestor_bits.stride(2),
            words=step.ancestor_bits.shape[2],
            stride_depths=0 if depths is None else depths.stride(0),
            STRIDE_KV_BLOCK=kv_cache.stride(0),
            STRIDE_KV_HEAD=kv_cache.stride(1),
            STRIDE_KV_ROW=kv_cache.stride(2),
            STRIDE_KV_COL=kv_cache.stride(3),
            KV_HEADS=workspace.kv_heads,
            GROUP=workspace.group,
            DIM=workspace.head_dim,
            BLOCK_D=workspace.block_d,
            BLOCK_Q=workspace.block_q,
            BLOCK_M=workspace.tiles.block_m,
            BLOCK_N=workspace.tiles.block_n,
            PAGE=kv_cache.shape[2],
            SOFTCAP=softcap > 0,
            WINDOW=self.window,
            MAX_TAIL=workspace.max_tail,
            STAGES=workspace.tiles.stages,
            MERGE_STAGES=_MERGE_STAGES,
            BUNDLE_FIELDS=BUNDLE_FIELDS,
            RUN_FIELDS=RUN_FIELDS,
            num_warps=workspace.tiles.num_warps,
            # the default until Triton 3.10
            enable_fp_fusion=True,
        )

    def cpu(self, step: AttentionStep, query: Tensor, out: Tensor) -> None:
        """Run `cpu.attention`; TypeError for dtypes that it does not support."""
        load("bastion_kernels.cpu.attention", "tree_attention_cpu")(self, step, query, out)
