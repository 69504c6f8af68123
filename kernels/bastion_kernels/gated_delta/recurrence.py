# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule over trees: one chunk per request, no state per node.

A node's state follows from its parent's p, with g = log of the gate:

    u_i = beta_i (v_i - e^{g_i} S_p^T k_i)      S_i = e^{g_i} S_p + k_i u_i^T      o_i = S_i^T q_i

Unrolled back to the state S before the step, with G_i the sum of g over i and its ancestors:

    u_i = beta_i (v_i - e^{G_i} S^T k_i - sum_{j above i} e^{G_i - G_j} (k_j . k_i) u_j)
    o_i = e^{G_i} S^T q_i + sum_{j above i, and i} e^{G_i - G_j} (k_j . q_i) u_j

This is one unit lower-triangular solve per head, masked by the ancestor bits. g <= 0, so no
exponential along a path exceeds 1. G is summed in float64: after a gate that forgets nearly
everything, G_i - G_j would cancel in fp32. Rows see each other as in `tree_attention`; chains, a
chain before a tree, and trees need no distinction. `gated_delta_commit` advances the state along
the accepted rows, the last of which is a:

    S <- e^{G_a} S + sum_{j accepted} e^{G_a - G_j} k_j u_j^T

This holds for any prefix of the path, so a step can commit twice: to the end of the path, and to
the end of a block inside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from bastion_kernels.gated_delta.kernels import gated_delta_commit_kernel, gated_delta_tree_kernel
from bastion_kernels.gated_delta.states import LayerStates
from bastion_kernels.op import Op, cdiv, padded, public

# rows solved at once, value columns of a program, key columns of a product
_BLOCK, _BLOCK_V, _BLOCK_D = 16, 16, 32


@dataclass(slots=True)
class GatedDeltaTree(Op):
    """Compute the output of every row from its request's state and its ancestors.

    The state is not changed. Value head h has key head h // (H / Hk). The last dimension of every
    tensor but `state` is contiguous.
    """

    query: Annotated[Tensor, "[T, HK, DIM]"]  # normalised as the model does
    key: Annotated[Tensor, "[T, HK, DIM]"]  # normalised as the model does
    value: Annotated[Tensor, "[T, HEADS, WIDTH]"]
    gate: Annotated[Tensor, "[T, HEADS] float32"]  # log of the decay, <= 0
    beta: Annotated[Tensor, "[T, HEADS] float32"]
    state: Annotated[Tensor, "[B, HEADS, DIM, WIDTH], strided"]  # any strides and floating type
    state_rows: Annotated[Tensor, "[R]"]  # the request's row of `state`; -1 = skip this request
    query_start_loc: Annotated[Tensor, "[R + 1] int32"]  # first row of each request
    # Rows of the request's tail (root and nodes); 0 = causal only.
    tail_lens: Annotated[Tensor, "[*] int32"]
    slots: Annotated[Tensor, "[*] int64"]  # the request's row of the bits; -1 = causal only
    # Bit j of node i set iff j is i or its ancestor.
    ancestor_bits: Annotated[Tensor, "[S, N, W] int32"]
    scale: float  # factor of the output
    out: Annotated[Tensor, "[T, HEADS, WIDTH]"]  # written
    # Written for `gated_delta_commit`, contiguous: u and G of every row.
    updates: Annotated[Tensor, "[>= T, HEADS, WIDTH] float32"]
    decays: Annotated[Tensor, "[>= T, HEADS] float64"]

    def check(self) -> None:
        Op.check(self)
        heads, key_heads = self.value.shape[1], self.key.shape[1]
        if heads % key_heads:
            raise ValueError(f"{self.name}: {heads} value heads over {key_heads} key heads")
        if not (self.updates.is_contiguous() and self.decays.is_contiguous()):
            raise ValueError(f"{self.name}: updates and decays must be contiguous")

    def triton(self) -> None:
        """Blocks of rows in order; heads and value columns in parallel."""
        heads, width = self.value.shape[1:]
        self.launch(
            gated_delta_tree_kernel,
            self.state_rows.shape[0],
            heads,
            cdiv(width, _BLOCK_V),
            GROUP=heads // self.key.shape[1],
            BLOCK_D=_BLOCK_D,
            BLOCK_V=_BLOCK_V,
            BLOCK=_BLOCK,
            num_warps=4,
        )


gated_delta_tree = public(GatedDeltaTree)


@dataclass(slots=True)
class GatedDeltaCommit(Op):
    """Advance the states of all layers along the accepted rows."""

    # Of `gated_delta_tree` in the same step, by layer.
    key: Annotated[Tensor, "[L, T, HK, DIM]"]
    updates: Annotated[Tensor, "[L, *, HEADS, WIDTH] float32"]
    decays: Annotated[Tensor, "[L, *, HEADS] float64"]
    states: LayerStates  # the states [B, HEADS, DIM, WIDTH] of the L layers, written
    # The request's row of the states in each group of layers; -1 = none.
    state_rows: Annotated[Tensor, "[G, R] int32"]
    # The row that each of COMMITS writes; -1 = none. The last may write the row that all read.
    into_rows: Annotated[Tensor, "[COMMITS, G, R] int32"]
    query_start_loc: Annotated[Tensor, "[R + 1] int32"]  # first row of each request
    # First logits row of each request; its last `cu[r+1] - cu[r]` rows are its tail.
    cu_num_logits: Annotated[Tensor, "[R + 1] int32"]
    # Node numbers of the accepted path, path[r, 0] = 0, -1 past its end; a request whose path is
    # empty keeps its state.
    path: Annotated[Tensor, "[R, PATH] int32"]
    # Entries of the path that each commit follows at most; None: all.
    lengths: Annotated[Tensor | None, "[COMMITS, R] int32"] = None

    def check(self) -> None:
        _, heads, dim, width = self.states.first.shape
        sizes = {"HEADS": heads, "DIM": dim, "WIDTH": width, "R": self.path.shape[0]}
        self.check_declared(L=len(self.states.states), **sizes)

    def triton(self) -> None:
        """One matrix product per block of accepted rows."""
        (layers, _, heads, width), dim = self.updates.shape, self.key.shape[3]
        self.launch(
            gated_delta_commit_kernel,
            self.path.shape[0],
            layers * heads,
            cdiv(width, _BLOCK_V),
            **self.states.arguments("bhdw"),
            PATHS=padded(self.path.shape[1]),
            GROUP=heads // self.key.shape[2],
            BLOCK_D=padded(dim, 16),
            BLOCK_V=_BLOCK_V,
            BLOCK=_BLOCK,
            num_warps=4,
        )


gated_delta_commit = public(GatedDeltaCommit, cpu="bastion_kernels.cpu.gated_delta")
