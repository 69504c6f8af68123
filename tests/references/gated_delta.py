# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers over trees: a step's rows, and the state after the accepted ones."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from bastion_kernels.gated_delta.recurrence import GatedDeltaCommit, GatedDeltaTree
from bastion_kernels.gated_delta.short_conv import ShortConvCommit, ShortConvTree
from tests.references.attention import visible_rows
from tests.references.declare import of


@of(GatedDeltaTree)
def gated_delta_tree(op: GatedDeltaTree) -> None:
    """Row by row, in fp32: only what a row sees is read, so NaN stays in its branch."""
    group = op.value.shape[1] // op.key.shape[1]
    state_rows, tails, slots = op.state_rows.tolist(), op.tail_lens.tolist(), op.slots.tolist()
    for r, (first, last) in enumerate(pairwise(op.query_start_loc.tolist())):
        if first == last or state_rows[r] < 0:
            continue
        tail = tails[r] if slots[r] >= 0 else 0
        seen = visible_rows(last - first, last - first, tail, op.ancestor_bits[slots[r]])
        step = slice(first, last)
        # [H, n, K] of every value head
        q, k = (
            x[step].float().repeat_interleave(group, 1).transpose(0, 1) for x in (op.query, op.key)
        )
        v, b = op.value[step].float().transpose(0, 1), op.beta[step].float().T[..., None]
        decay = op.gate[step].double().T[:, None].where(seen, 0).sum(2)  # [H, n]
        carried = op.state[state_rows[r]].float()  # [H, K, V]
        own = decay.float().exp()[..., None]
        update, mixed = b * (v - own * (k @ carried)), own * (q @ carried)
        for i, sees in enumerate(seen):
            above = sees.nonzero().flatten()  # the row itself is the last
            left = k[:, above] * (decay[:, i, None] - decay[:, above]).float().exp()[..., None]
            before = slice(len(above) - 1)
            at_k, at_q = (left @ x[:, i, :, None] for x in (k, q))  # [H, m, 1]
            update[:, i] -= b[:, i] * (at_k[:, before] * update[:, above[before]]).sum(1)
            mixed[:, i] += (at_q * update[:, above]).sum(1)
        op.out[step] = (op.scale * mixed).transpose(0, 1).to(op.out.dtype)
        op.updates[step], op.decays[step] = update.transpose(0, 1), decay.T


@of(ShortConvTree)
def short_conv_tree(op: ShortConvTree) -> None:
    """One gather of the rows above each row."""
    taps = op.weight.shape[1]
    state_rows, tails, slots = op.state_rows.tolist(), op.tail_lens.tolist(), op.slots.tolist()
    for r, (first, last) in enumerate(pairwise(op.query_start_loc.tolist())):
        if first == last or state_rows[r] < 0:
            continue
        # inputs are the state's columns, then the step: its row i is at taps - 1 + i
        end = taps - 1 + last - first
        above = torch.arange(-1, end - 1, device=op.x.device)
        tail = tails[r] if slots[r] >= 0 else 0
        if tail > 1:
            above[end - tail + 1 :] = end - tail + op.parents[slots[r], : tail - 1].clamp(min=0)
        inputs = torch.cat([op.state[state_rows[r]].float().T, op.x[first:last].float()])
        row = torch.arange(taps - 1, end, device=op.x.device)
        total = torch.zeros_like(inputs[taps - 1 :])
        for tap in range(taps - 1, -1, -1):
            total += inputs[row] * op.weight[:, tap].float()
            row = above[row]
        op.out[first:last] = torch.nn.functional.silu(total).to(op.out.dtype)


def _accepted_rows(op: Any) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """For every commit, layer and request of a commit op: layer, states read and written, rows.

    The rows are the accepted ones: those before the root, the root and the nodes of the path.
    """
    starts, logits = op.query_start_loc.tolist(), op.cu_num_logits.tolist()
    states, path, lengths = op.states, op.path, op.lengths
    for commit, to_rows in enumerate(op.into_rows.tolist()):
        rows: list[Tensor] = []
        for r, (first, last) in enumerate(pairwise(starts)):
            tail = logits[r + 1] - logits[r]
            nodes = path[r] if lengths is None else path[r, : int(lengths[commit, r])]
            nodes = nodes[((nodes >= 0) & (nodes < tail)).long().cumprod(0).bool()]
            # a request without a state may have a tail but no rows
            root = max(first, last - tail)
            before = torch.arange(first, root if len(nodes) else first, device=path.device)
            rows.append(torch.cat([before, root + nodes.long()]))
        for layer, (state, group) in enumerate(zip(states.states, states.groups, strict=True)):
            places = zip(op.state_rows[group].tolist(), to_rows[group], rows, strict=False)
            for own, into, accepted in places:
                if own >= 0 and into >= 0 and len(accepted):
                    yield layer, state[own], state[into], accepted


@of(GatedDeltaCommit)
def gated_delta_commit(op: GatedDeltaCommit) -> None:
    group = op.updates.shape[2] // op.key.shape[2]
    for layer, state, into, rows in _accepted_rows(op):
        decay = op.decays[layer, rows]  # [n, H]
        weight = (decay[-1] - decay).float().exp()[..., None]
        k = op.key[layer, rows].float().repeat_interleave(group, 1) * weight
        moved = torch.einsum("nhk,nhv->hkv", k, op.updates[layer, rows])
        into.copy_(state.float() * decay[-1].float().exp()[:, None, None] + moved)


@of(ShortConvCommit)
def short_conv_commit(op: ShortConvCommit) -> None:
    for layer, state, into, rows in _accepted_rows(op):
        inputs = torch.cat([state.T, op.x[layer, rows].to(state.dtype)])
        into.copy_(inputs[-state.shape[1] :].T)
