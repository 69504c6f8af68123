# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule over trees: one chunk a request, no state per node.

A node's state follows from its parent's p, with g = log of the gate:

    u_i = beta_i (v_i - e^{g_i} S_p^T k_i)      S_i = e^{g_i} S_p + k_i u_i^T      o_i = S_i^T q_i

Unrolled to the state S before the step, with G_i the sum of g over i and its ancestors in the step:

    u_i = beta_i (v_i - e^{G_i} S^T k_i - sum_{j above i} e^{G_i - G_j} (k_j . k_i) u_j)
    o_i = e^{G_i} S^T q_i + sum_{j above i, and i} e^{G_i - G_j} (k_j . q_i) u_j

which is one unit lower-triangular solve per head, masked by the ancestor bits; g <= 0, so along a
path no exponential exceeds 1. G is summed in float64: a gate that forgets nearly all is in G_i and
in G_j of all rows behind it, and their difference would lose its last digits. What a row sees of
its step is what it sees in `tree_attention`: chains, a chain in front of a tree and trees take the
same path. `gated_delta_commit` moves the state along the accepted rows, the last of them a:

    S <- e^{G_a} S + sum_{j accepted} e^{G_a - G_j} k_j u_j^T

For any part of the path from its root this gives the state after that part, so a step can commit
twice: to a block's end inside the path, and to the path's end.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from bastion_kernels.gated_delta.kernels import gated_delta_commit_kernel, gated_delta_tree_kernel
from bastion_kernels.gated_delta.states import LayerStates, accepted_rows
from bastion_kernels.op import Op, public
from bastion_kernels.triton_or_none import triton

# rows that are solved at once, columns of values of one program, and of keys in one product
_BLOCK, _BLOCK_V, _BLOCK_D = 16, 16, 32


def _seen(rows: int, tail: int, bits: Tensor) -> Tensor:
    """`[rows, rows]` bool: which of a request's rows of the step each sees, itself included."""
    at = torch.arange(rows, device=bits.device)
    seen = at <= at[:, None]
    if tail > 1:
        shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
        ancestors = ((bits[:tail, :, None] >> shifts) & 1).flatten(1)[:, :tail].bool()
        seen[rows - tail :, rows - tail :] = ancestors
        seen.fill_diagonal_(True)
    return seen


@dataclass(slots=True)
class GatedDeltaTree(Op):
    """Output of every row of the step after its request's state and its ancestors.

    The state is only read. Value head h has key head h // (H / Hk). The last dimension of every
    tensor but `state` is contiguous.

    Raises:
        ValueError, TypeError: shapes or dtypes do not fit together.
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
    """`[R]`, the request's row of `state`; -1 = this request is left alone."""
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

    def reference(self) -> None:
        """One triangular solve a request, in fp32."""
        group = self.value.shape[1] // self.key.shape[1]
        state_rows, tails = self.state_rows.tolist(), self.tail_lens.tolist()
        slots = self.slots.tolist()
        for r, (first, last) in enumerate(pairwise(self.query_start_loc.tolist())):
            if first == last or state_rows[r] < 0:
                continue
            tail = tails[r] if slots[r] >= 0 else 0
            seen = _seen(last - first, tail, self.ancestor_bits[slots[r]])
            step = slice(first, last)
            # [H, n, K] of every value head
            q, k = (
                x[step].float().repeat_interleave(group, 1).transpose(0, 1)
                for x in (self.query, self.key)
            )
            v, b = self.value[step].float().transpose(0, 1), self.beta[step].float().T[..., None]
            decay = self.gate[step].double().T @ seen.double().T  # [H, n]
            between = (decay[:, :, None] - decay[:, None]).masked_fill(~seen, -torch.inf)
            between = between.float().exp()
            carried = self.state[state_rows[r]].float()  # [H, K, V]
            own = decay.float().exp()[..., None]
            system = (k @ k.mT * between * b).tril(-1)
            right = b * (v - own * (k @ carried))
            update = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
            mixed = own * (q @ carried) + (q @ k.mT * between) @ update
            self.out[step] = (self.scale * mixed).transpose(0, 1).to(self.out.dtype)
            self.updates[step], self.decays[step] = update.transpose(0, 1), decay.T

    def triton(self) -> None:
        """Blocks of rows one after the other, heads and values in parallel."""
        reqs, heads = self.state_rows.shape[0], self.value.shape[1]
        dim, width = self.state.shape[2:]
        gated_delta_tree_kernel[(reqs, heads, triton.cdiv(width, _BLOCK_V))](
            self.query,
            self.key,
            self.value,
            self.gate,
            self.beta,
            self.state,
            self.state_rows,
            self.query_start_loc,
            self.tail_lens,
            self.slots,
            self.ancestor_bits,
            self.out,
            self.updates,
            self.decays,
            self.scale,
            *self.query.stride()[:2],
            *self.key.stride()[:2],
            *self.value.stride()[:2],
            self.gate.stride(0),
            self.beta.stride(0),
            *self.state.stride(),
            *self.ancestor_bits.stride(),
            self.ancestor_bits.shape[2],
            *self.out.stride()[:2],
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
    """Move the states of all layers along the accepted rows.

    Raises:
        ValueError, TypeError: shapes or dtypes do not fit together.
    """

    key: Tensor
    """`[L, T, Hk, K]`, the keys of `gated_delta_tree` in the same step, by layer."""
    updates: Tensor
    """`[L, >= T, H, V]` float32, what `gated_delta_tree` wrote for each layer."""
    decays: Tensor
    """`[L, >= T, H]` float64, what `gated_delta_tree` wrote for each layer."""
    states: LayerStates
    """The states `[B, H, K, V]` of the L layers, written."""
    state_rows: Tensor
    """`[G, R]` integer, the request's row of the states in each group of layers; -1 = none."""
    into_rows: Tensor
    """`[G, R]` integer, the row to write; -1 = none. It may be the row that is read."""
    query_start_loc: Tensor
    """`[R+1]` int32, first row of each request."""
    cu_num_logits: Tensor
    """`[R+1]` int32, first logits row of each request; its last `cu[r+1] - cu[r]` rows are its
    tail."""
    path: Tensor
    """`[R, D+1]` int32, node numbers of the accepted path, path[r, 0] = 0, -1 past its end; a
    request whose path is empty keeps its state."""

    def check(self) -> None:
        reqs, layers = self.path.shape[0], len(self.states.states)
        _, heads, dim, width = self.states.first.shape
        self.expect("key", (layers, None, None, dim), self.key.dtype)
        self.expect("updates", (layers, None, heads, width), torch.float32)
        self.expect("decays", (layers, None, heads), torch.float64)
        for name in ("state_rows", "into_rows"):
            self.expect(name, (None, reqs), torch.int32, torch.int64)
        self.expect("query_start_loc", (reqs + 1,), torch.int32)
        self.expect("cu_num_logits", (reqs + 1,), torch.int32)
        self.expect("path", (reqs, None), torch.int32)

    def reference(self) -> None:
        """Request by request, in fp32."""
        group = self.updates.shape[2] // self.key.shape[2]
        where = self.into_rows, self.query_start_loc, self.cu_num_logits, self.path
        for layer, state, into, rows in accepted_rows(self.states, self.state_rows, *where):
            decay = self.decays[layer, rows]  # [n, H]
            weight = (decay[-1] - decay).float().exp()[..., None]
            k = self.key[layer, rows].float().repeat_interleave(group, 1) * weight
            moved = torch.einsum("nhk,nhv->hkv", k, self.updates[layer, rows])
            carried = state.float() * decay[-1].float().exp()[:, None, None]
            into.copy_(carried + moved)

    def triton(self) -> None:
        """Accepted rows in blocks, as one product."""
        (layers, _, heads, width), dim = self.updates.shape, self.key.shape[3]
        reqs = self.path.shape[0]
        if reqs == 0:
            return
        gated_delta_commit_kernel[(reqs, layers * heads, triton.cdiv(width, _BLOCK_V))](
            self.key,
            self.updates,
            self.decays,
            self.states.table,
            self.state_rows,
            self.into_rows,
            self.query_start_loc,
            self.cu_num_logits,
            self.path,
            *self.key.stride()[:3],
            self.updates.stride(0),
            self.decays.stride(0),
            *self.states.first.stride(),
            self.state_rows.stride(0),
            self.into_rows.stride(0),
            self.path.stride(0),
            **self.states.arguments(),
            PATH=self.path.shape[1],
            PATHS=triton.next_power_of_2(self.path.shape[1]),
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
