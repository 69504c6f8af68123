# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule over trees: one chunk per request, no state per node.

A node's state follows from its parent's p, with g = log of the gate:

    u_i = beta_i (v_i - e^{g_i} S_p^T k_i)      S_i = e^{g_i} S_p + k_i u_i^T      o_i = S_i^T q_i

Unrolled back to the state S before the step, with G_i the sum of g over i and its ancestors:

    u_i = beta_i (v_i - e^{G_i} S^T k_i - sum_{j above i} e^{G_i - G_j} (k_j . k_i) u_j)
    o_i = e^{G_i} S^T q_i + sum_{j above i, and i} e^{G_i - G_j} (k_j . q_i) u_j

This is one unit lower-triangular solve per head, masked by the ancestor bits. g <= 0, so no
exponential along a path exceeds 1. G is summed in float64: after a gate that forgets nearly
everything, G_i - G_j would cancel in fp32. Rows are visible to each other as in `tree_attention`;
chains, a chain before a tree, and trees need no distinction. `gated_delta_commit` advances the
state along the accepted rows, the last of which is a:

    S <- e^{G_a} S + sum_{j accepted} e^{G_a - G_j} k_j u_j^T

This holds for any prefix of the path, so a step can commit twice: to the end of the path, and to
the end of a block inside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bastion_kernels.gated_delta.kernels import gated_delta_commit_kernel, gated_delta_tree_kernel
from bastion_kernels.gated_delta.states import LayerStates, check_commits
from bastion_kernels.op import Op, public
from bastion_kernels.triton_or_none import triton

# rows solved at once, value columns of a program, key columns of a product
_BLOCK, _BLOCK_V, _BLOCK_D = 16, 16, 32


@dataclass(slots=True)
class GatedDeltaTree(Op):
    """Compute the output of every row from its request's state and its ancestors.

    The state is not changed. Value head h has key head h // (H / Hk). The last dimension of every
    tensor but `state` is contiguous.
    """

    query: Tensor
    """`[T, Hk, K]`, normalised as the model does."""
    key: Tensor
    """`[T, Hk, K]`, normalised as the model does."""
    value: Tensor
    """`[T, H, V]`."""
    gate: Tensor
    """`[T, H]` float32, log of the decay, <= 0."""
    beta: Tensor
    """`[T, H]` float32."""
    state: Tensor
    """`[B, H, K, V]`, any strides and floating type."""
    state_rows: Tensor
    """`[R]`, the request's row of `state`; -1 = skip this request."""
    query_start_loc: Tensor
    """`[R+1]` int32."""
    tail_lens: Tensor
    """`[R]` int32, rows of the request's tail (root and nodes); 0 = causal only."""
    slots: Tensor
    """`[R]` int64, the request's row of `ancestor_bits`; -1 = causal only."""
    ancestor_bits: Tensor
    """`[S, N+1, W]` int32, bit j of node i set iff j is i or its ancestor."""
    scale: float
    """Factor of the output."""
    out: Tensor
    """`[T, H, V]`, written."""
    updates: Tensor
    """`[>= T, H, V]` float32, u of every row, written for `gated_delta_commit`."""
    decays: Tensor
    """`[>= T, H]` float64, G of every row, written for the same."""

    def check(self) -> None:
        rows, heads, width = self.value.shape
        for name in ("query", "key"):
            self.expect(name, (rows, None, self.state.shape[2]), self.query.dtype)
        if heads % self.key.shape[1] or self.query.shape[1] != self.key.shape[1]:
            raise ValueError(f"{self.name}: {heads} value heads over {self.key.shape[1]} key heads")
        self.expect("state", (None, heads, None, width), self.state.dtype, strided=True)
        for name in ("gate", "beta"):
            self.expect(name, (rows, heads), torch.float32)
        self.expect("out", (rows, heads, width), self.out.dtype)
        self.expect("updates", (None, heads, width), torch.float32)
        self.expect("decays", (None, heads), torch.float64)
        for name, tensor in (("updates", self.updates), ("decays", self.decays)):
            if tensor.shape[0] < rows or not tensor.is_contiguous():
                raise ValueError(
                    f"{self.name}: {name} must be contiguous with at least {rows} rows"
                )

    def triton(self) -> None:
        """Blocks of rows in order; heads and value columns in parallel."""
        reqs, heads = self.state_rows.shape[0], self.value.shape[1]
        dim, width = self.state.shape[2:]
        gated_delta_tree_kernel[(reqs, heads, triton.cdiv(width, _BLOCK_V))](
            query=self.query,
            key=self.key,
            value=self.value,
            gate=self.gate,
            beta=self.beta,
            state=self.state,
            state_rows=self.state_rows,
            query_start_loc=self.query_start_loc,
            tail_lens=self.tail_lens,
            slots=self.slots,
            ancestor_bits=self.ancestor_bits,
            out=self.out,
            updates=self.updates,
            decays=self.decays,
            scale=self.scale,
            stride_query_row=self.query.stride(0),
            stride_query_head=self.query.stride(1),
            stride_key_row=self.key.stride(0),
            stride_key_head=self.key.stride(1),
            stride_value_row=self.value.stride(0),
            stride_value_head=self.value.stride(1),
            stride_gate=self.gate.stride(0),
            stride_beta=self.beta.stride(0),
            stride_state=self.state.stride(0),
            stride_state_head=self.state.stride(1),
            stride_state_dim=self.state.stride(2),
            stride_state_col=self.state.stride(3),
            stride_bits_slot=self.ancestor_bits.stride(0),
            stride_bits_node=self.ancestor_bits.stride(1),
            stride_bits_word=self.ancestor_bits.stride(2),
            words=self.ancestor_bits.shape[2],
            stride_out_row=self.out.stride(0),
            stride_out_head=self.out.stride(1),
            HEADS=heads,
            GROUP=heads // self.key.shape[1],
            DIM=dim,
            WIDTH=width,
            BLOCK_D=_BLOCK_D,
            BLOCK_V=_BLOCK_V,
            BLOCK=_BLOCK,
            num_warps=4,
        )


gated_delta_tree = public(GatedDeltaTree)


@dataclass(slots=True)
class GatedDeltaCommit(Op):
    """Advance the states of all layers along the accepted rows."""

    key: Tensor
    """`[L, T, Hk, K]`, the keys of `gated_delta_tree` in the same step, by layer."""
    updates: Tensor
    """`[L, >= T, H, V]` float32, written by `gated_delta_tree`, by layer."""
    decays: Tensor
    """`[L, >= T, H]` float64, written by `gated_delta_tree`, by layer."""
    states: LayerStates
    """The states `[B, H, K, V]` of the L layers, written."""
    state_rows: Tensor
    """`[G, R]` int32, the request's row of the states in each group of layers; -1 = none."""
    into_rows: Tensor
    """`[C, G, R]` int32, the row that each of C commits writes; -1 = none. The last may write the
    row that all read."""
    query_start_loc: Tensor
    """`[R+1]` int32, first row of each request."""
    cu_num_logits: Tensor
    """`[R+1]` int32, first logits row of each request; its last `cu[r+1] - cu[r]` rows are its
    tail."""
    path: Tensor
    """`[R, depth + 1]` int32, node numbers of the accepted path, path[r, 0] = 0, -1 past its end; a
    request whose path is empty keeps its state."""
    lengths: Tensor | None = None
    """`[C, R]` int32, entries of the path that each commit follows at most; None: all."""

    def check(self) -> None:
        layers = len(self.states.states)
        _, heads, dim, width = self.states.first.shape
        self.expect("key", (layers, None, None, dim), self.key.dtype)
        self.expect("updates", (layers, None, heads, width), torch.float32)
        self.expect("decays", (layers, None, heads), torch.float64)
        check_commits(self)

    def triton(self) -> None:
        """One matrix product per block of accepted rows."""
        (layers, _, heads, width), dim = self.updates.shape, self.key.shape[3]
        reqs = self.path.shape[0]
        if reqs == 0:
            return
        gated_delta_commit_kernel[(reqs, layers * heads, triton.cdiv(width, _BLOCK_V))](
            key=self.key,
            updates=self.updates,
            decays=self.decays,
            table=self.states.table,
            state_rows=self.state_rows,
            into_rows=self.into_rows,
            query_start_loc=self.query_start_loc,
            cu_num_logits=self.cu_num_logits,
            path=self.path,
            lengths=self.lengths,
            stride_key_layer=self.key.stride(0),
            stride_key_row=self.key.stride(1),
            stride_key_head=self.key.stride(2),
            stride_updates_layer=self.updates.stride(0),
            stride_decays_layer=self.decays.stride(0),
            stride_state=self.states.first.stride(0),
            stride_state_head=self.states.first.stride(1),
            stride_state_dim=self.states.first.stride(2),
            stride_state_col=self.states.first.stride(3),
            stride_state_rows=self.state_rows.stride(0),
            stride_commit=self.into_rows.stride(0),
            stride_into_rows=self.into_rows.stride(1),
            stride_path=self.path.stride(0),
            stride_lengths=0 if self.lengths is None else self.lengths.stride(0),
            **self.states.arguments(),
            PATH=self.path.shape[1],
            PATHS=triton.next_power_of_2(self.path.shape[1]),
            COMMITS=self.into_rows.shape[0],
            HEADS=heads,
            GROUP=heads // self.key.shape[2],
            DIM=dim,
            WIDTH=width,
            BLOCK_D=max(16, triton.next_power_of_2(dim)),
            BLOCK_V=_BLOCK_V,
            BLOCK=_BLOCK,
            num_warps=4,
        )


gated_delta_commit = public(GatedDeltaCommit, cpu="bastion_kernels.cpu.gated_delta")
