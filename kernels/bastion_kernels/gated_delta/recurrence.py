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
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from bastion_kernels.checks import check, on_gpu
from bastion_kernels.gated_delta.kernels import gated_delta_commit_kernel, gated_delta_tree_kernel
from bastion_kernels.gated_delta.states import LayerStates, accepted_rows
from bastion_kernels.triton_or_none import triton

__all__ = [
    "gated_delta_commit",
    "gated_delta_commit_reference",
    "gated_delta_commit_triton",
    "gated_delta_tree",
    "gated_delta_tree_reference",
    "gated_delta_tree_triton",
]

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


def gated_delta_tree_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    beta: Tensor,
    state: Tensor,
    state_rows: Tensor,
    query_start_loc: Tensor,
    tail_lens: Tensor,
    slots: Tensor,
    ancestor_bits: Tensor,
    scale: float,
    out: Tensor,
    updates: Tensor,
    decays: Tensor,
) -> None:
    """One triangular solve a request, in fp32; what a CPU runs. See `gated_delta_tree`."""
    group = value.shape[1] // key.shape[1]
    places, tails, of_slot = state_rows.tolist(), tail_lens.tolist(), slots.tolist()
    for r, (first, last) in enumerate(pairwise(query_start_loc.tolist())):
        if first == last or places[r] < 0:
            continue
        tail = tails[r] if of_slot[r] >= 0 else 0
        seen = _seen(last - first, tail, ancestor_bits[of_slot[r]])
        step = slice(first, last)
        # [H, n, K] of every value head
        q, k = (x[step].float().repeat_interleave(group, 1).transpose(0, 1) for x in (query, key))
        v, b = value[step].float().transpose(0, 1), beta[step].float().T[..., None]
        decay = gate[step].double().T @ seen.double().T  # [H, n]
        between = (decay[:, :, None] - decay[:, None]).masked_fill(~seen, -torch.inf)
        between = between.float().exp()
        carried = state[places[r]].float()  # [H, K, V]
        own = decay.float().exp()[..., None]
        system = (k @ k.mT * between * b).tril(-1)
        right = b * (v - own * (k @ carried))
        update = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        mixed = own * (q @ carried) + (q @ k.mT * between) @ update
        out[step] = (scale * mixed).transpose(0, 1).to(out.dtype)
        updates[step], decays[step] = update.transpose(0, 1), decay.T


def gated_delta_tree_triton(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    beta: Tensor,
    state: Tensor,
    state_rows: Tensor,
    query_start_loc: Tensor,
    tail_lens: Tensor,
    slots: Tensor,
    ancestor_bits: Tensor,
    scale: float,
    out: Tensor,
    updates: Tensor,
    decays: Tensor,
) -> None:
    """Blocks of rows one after the other, heads and values in parallel; see `gated_delta_tree`."""
    reqs, heads, (dim, width) = state_rows.shape[0], value.shape[1], state.shape[2:]
    gated_delta_tree_kernel[(reqs, heads, triton.cdiv(width, _BLOCK_V))](
        query,
        key,
        value,
        gate,
        beta,
        state,
        state_rows,
        query_start_loc,
        tail_lens,
        slots,
        ancestor_bits,
        out,
        updates,
        decays,
        scale,
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        gate.stride(0),
        beta.stride(0),
        *state.stride(),
        *ancestor_bits.stride(),
        ancestor_bits.shape[2],
        *out.stride()[:2],
        HEADS=heads,
        GROUP=heads // key.shape[1],
        DIM=dim,
        WIDTH=width,
        BLOCK_D=_BLOCK_D,
        BLOCK_V=_BLOCK_V,
        BLOCK=_BLOCK,
        num_warps=4,
    )


def gated_delta_tree(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    beta: Tensor,
    state: Tensor,
    state_rows: Tensor,
    query_start_loc: Tensor,
    tail_lens: Tensor,
    slots: Tensor,
    ancestor_bits: Tensor,
    scale: float,
    out: Tensor,
    updates: Tensor,
    decays: Tensor,
) -> None:
    """Output of every row of the step after its request's state and its ancestors.

    The state is only read. Value head h has key head h // (H / Hk). The last dimension of every
    tensor but `state` is contiguous.

    Args:
        query, key: `[T, Hk, K]`, normalised as the model does.
        value: `[T, H, V]`.
        gate: `[T, H]` float32, log of the decay, <= 0.
        beta: `[T, H]` float32.
        state: `[B, H, K, V]`, any strides and floating type.
        state_rows: `[R]`, the request's row of `state`; -1 = this request is left alone.
        query_start_loc: `[R+1]` int32.
        tail_lens: `[R]` int32, rows of the request's tail (root and nodes); 0 = causal only.
        slots: `[R]` int64, the request's row of `ancestor_bits`; -1 = causal only.
        ancestor_bits: `[S, N+1, W]` int32, bit j of node i set iff j is i or its ancestor.
        scale: factor of the output.
        out: `[T, H, V]`, written.
        updates: `[>= T, H, V]` float32, u of every row, written for `gated_delta_commit`.
        decays: `[>= T, H]` float64, G of every row, written for the same.

    Raises:
        ValueError, TypeError: shapes or dtypes do not fit together.
    """
    op, (rows, heads, width) = "gated_delta_tree", value.shape
    for name, tensor in (("query", query), ("key", key)):
        check(op, name, tensor, (rows, None, state.shape[2]), query.dtype)
    if heads % key.shape[1] or query.shape[1] != key.shape[1]:
        raise ValueError(f"{op}: {heads} value heads over {key.shape[1]} key heads")
    check(op, "state", state, (None, heads, None, width), state.dtype, strided=True)
    for name, tensor in (("gate", gate), ("beta", beta)):
        check(op, name, tensor, (rows, heads), torch.float32)
    check(op, "out", out, (rows, heads, width), out.dtype)
    check(op, "updates", updates, (None, heads, width), torch.float32)
    check(op, "decays", decays, (None, heads), torch.float64)
    for name, tensor in (("updates", updates), ("decays", decays)):
        if tensor.shape[0] < rows or not tensor.is_contiguous():
            raise ValueError(f"{op}: {name} must be contiguous with at least {rows} rows")
    run = gated_delta_tree_triton if on_gpu(value) else gated_delta_tree_reference
    run(
        query, key, value, gate, beta, state, state_rows, query_start_loc, tail_lens, slots,
        ancestor_bits, scale, out, updates, decays,
    )  # fmt: skip


def gated_delta_commit_reference(
    key: Tensor,
    updates: Tensor,
    decays: Tensor,
    states: LayerStates,
    state_rows: Tensor,
    query_start_loc: Tensor,
    cu_num_logits: Tensor,
    path: Tensor,
) -> None:
    """Request by request, in fp32; what a CPU runs. See `gated_delta_commit`."""
    group, where = updates.shape[2] // key.shape[2], (query_start_loc, cu_num_logits, path)
    for layer, state, rows in accepted_rows(states, state_rows, *where):
        decay = decays[layer, rows]  # [n, H]
        weight = (decay[-1] - decay).float().exp()[..., None]
        k = key[layer, rows].float().repeat_interleave(group, 1) * weight
        moved = torch.einsum("nhk,nhv->hkv", k, updates[layer, rows])
        carried = state.float() * decay[-1].float().exp()[:, None, None]
        state.copy_(carried + moved)


def gated_delta_commit_triton(
    key: Tensor,
    updates: Tensor,
    decays: Tensor,
    states: LayerStates,
    state_rows: Tensor,
    query_start_loc: Tensor,
    cu_num_logits: Tensor,
    path: Tensor,
) -> None:
    """Accepted rows in blocks, as one product; see `gated_delta_commit`."""
    (layers, _, heads, width), dim = updates.shape, key.shape[3]
    gated_delta_commit_kernel[(path.shape[0], layers * heads, triton.cdiv(width, _BLOCK_V))](
        key,
        updates,
        decays,
        states.table,
        state_rows,
        query_start_loc,
        cu_num_logits,
        path,
        *key.stride()[:3],
        updates.stride(0),
        decays.stride(0),
        *states.first.stride(),
        state_rows.stride(0),
        path.stride(0),
        **states.arguments(),
        PATH=path.shape[1],
        PATHS=triton.next_power_of_2(path.shape[1]),
        HEADS=heads,
        GROUP=heads // key.shape[2],
        DIM=dim,
        WIDTH=width,
        BLOCK_D=max(16, triton.next_power_of_2(dim)),
        BLOCK_V=_BLOCK_V,
        BLOCK=_BLOCK,
        num_warps=4,
    )


def gated_delta_commit(
    key: Tensor,
    updates: Tensor,
    decays: Tensor,
    states: LayerStates,
    state_rows: Tensor,
    query_start_loc: Tensor,
    cu_num_logits: Tensor,
    path: Tensor,
) -> None:
    """Move the states of all layers along the accepted rows, in place.

    Args:
        key, updates, decays: `[L, ..]`, of `gated_delta_tree` for the same step, by layer.
        states: of L layers, each as there.
        state_rows: `[G, R]`, as there, by the layers' group.
        query_start_loc: as there.
        cu_num_logits: `[R+1]` int32, first logits row of each request; its last
            `cu[r+1] - cu[r]` rows are its tail.
        path: `[R, D+1]` int32, node numbers of the accepted path, path[r, 0] = 0, -1 past its end;
            a request whose path is empty keeps its state.

    Raises:
        ValueError, TypeError: shapes or dtypes do not fit together.
    """
    op, reqs, layers = "gated_delta_commit", path.shape[0], len(states.states)
    _, heads, dim, width = states.first.shape
    check(op, "key", key, (layers, None, None, dim), key.dtype)
    check(op, "updates", updates, (layers, None, heads, width), torch.float32)
    check(op, "decays", decays, (layers, None, heads), torch.float64)
    check(op, "state_rows", state_rows, (None, reqs), torch.int32, torch.int64)
    check(op, "query_start_loc", query_start_loc, (reqs + 1,), torch.int32)
    check(op, "cu_num_logits", cu_num_logits, (reqs + 1,), torch.int32)
    check(op, "path", path, (reqs, None), torch.int32)
    if reqs == 0:
        return
    run = gated_delta_commit_triton if on_gpu(path) else gated_delta_commit_reference
    run(key, updates, decays, states, state_rows, query_start_loc, cu_num_logits, path)
