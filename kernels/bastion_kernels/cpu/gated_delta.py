# SPDX-License-Identifier: Apache-2.0
"""Gated delta layers over trees on a CPU.

`gated_delta_layer` runs a layer's convolution, normalisation and recurrence in one call. On a GPU
these are `short_conv_tree`, a kernel of vLLM and `gated_delta_tree`. The kernels are
`csrc/gated_delta.cpp` and `csrc/gated_delta_commit.cpp`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch
from torch import Tensor

from bastion_kernels.cpu import library
from bastion_kernels.cpu.attention import FORMATS
from bastion_kernels.gated_delta.recurrence import GatedDeltaCommit
from bastion_kernels.gated_delta.short_conv import ShortConvCommit

_Numbers, _LayerArgs, _StepArgs, _RowsArgs, _CommitArgs, _DeltaCommitArgs, _ConvCommitArgs = map(
    library.struct,
    (
        "Numbers", "DeltaLayerArgs", "DeltaStepArgs", "DeltaRowsArgs", "CommitArgs",
        "DeltaCommitArgs", "ConvCommitArgs",
    ),
)  # fmt: skip


def _numbers(tensor: Tensor) -> ctypes.Structure:
    return _Numbers(tensor.data_ptr(), FORMATS[tensor.dtype])


def gated_delta_layer(
    weight: Tensor,
    decay_log: Tensor,
    decay_bias: Tensor,
    conv_state: Tensor,
    state: Tensor,
    saved: tuple[Tensor, Tensor, Tensor, Tensor],
    scale: float,
    step: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    rows: Tensor | None,
    mixed: Tensor,
    b: Tensor,
    a: Tensor,
    out: Tensor,
) -> None:
    """A layer's convolution, normalisation and recurrence over the tree rows of a step.

    Args:
        weight: `[C, W]`; channels are of queries, keys and values.
        decay_log: `[H]`, the model's A_log.
        decay_bias: `[H]`, its dt_bias.
        conv_state: `[B, C, W - 1]`, oldest input first.
        state: `[B, H, K, V]`.
        saved: inputs of the commits, written: `[M, C]`; keys `[M, Hk, K]`; updates `[M, H, V]`
            float32; decays `[M, H]` float64.
        scale: factor of the output.
        step: state_rows, query_start_loc, tail_lens and slots as in `gated_delta_tree`, and
            parents `[S, N]` int32, node number of each column's parent.
        rows: `[n]` int64, indices of the n tree rows among the step's; None = all rows.
        mixed: `[T, C]`, of the keys' dtype as the next three.
        b, a: `[T, H]`.
        out: `[T, H, V]`, written; its last dimension is contiguous.
    """
    conv_input, key, updates, decays = saved
    state_rows, query_start_loc, tail_lens, slots, parents = step
    layer_args = _LayerArgs(
        updates.shape[1], *key.shape[1:], updates.shape[2], weight.shape[1], FORMATS[key.dtype],
        _numbers(weight), *weight.stride(), _numbers(conv_state), *conv_state.stride(),
        _numbers(state), *state.stride(), _numbers(decay_log), _numbers(decay_bias), key.shape[0],
        conv_input.data_ptr(), key.data_ptr(), updates.data_ptr(), decays.data_ptr(), scale,
    )  # fmt: skip
    step_args = _StepArgs(
        state_rows.shape[0], state_rows.data_ptr(), query_start_loc.data_ptr(),
        tail_lens.data_ptr(), slots.data_ptr(), parents.data_ptr(), parents.stride(0),
        None if rows is None else rows.data_ptr(),
    )  # fmt: skip
    mixed, b, a = (x if x.stride(-1) == 1 else x.contiguous() for x in (mixed, b, a))
    rows_args = _RowsArgs(
        torch.get_num_threads(), mixed.data_ptr(), mixed.stride(0), b.data_ptr(), b.stride(0),
        a.data_ptr(), a.stride(0), out.data_ptr(), *out.stride()[:2],
    )  # fmt: skip
    library.load().bastion_gated_delta(
        ctypes.byref(layer_args), ctypes.byref(step_args), ctypes.byref(rows_args)
    )


def _commits(op: GatedDeltaCommit | ShortConvCommit) -> Iterator[ctypes.Structure]:
    """Common arguments of both ops, for each commit in order."""
    path, states, reads = op.path, op.states, op.state_rows
    for commit, into in enumerate(op.into_rows):
        yield _CommitArgs(
            torch.get_num_threads(), len(states.states), path.shape[0], states.table.data_ptr(),
            reads.data_ptr(), reads.stride(0), into.data_ptr(), into.stride(0),
            op.query_start_loc.data_ptr(), op.cu_num_logits.data_ptr(), path.data_ptr(),
            path.stride(0), path.shape[1],
            None if op.lengths is None else op.lengths[commit].data_ptr(),
        )  # fmt: skip


def gated_delta_commit(op: GatedDeltaCommit) -> None:
    """One unit of work per request, layer and head."""
    first = op.states.first
    for paths in _commits(op):
        args = _DeltaCommitArgs(
            paths, op.updates.shape[2], *op.key.shape[2:], op.updates.shape[3], _numbers(op.key),
            *op.key.stride()[:3], op.updates.data_ptr(), op.updates.stride(0),
            op.decays.data_ptr(), op.decays.stride(0), FORMATS[first.dtype], *first.stride(),
        )  # fmt: skip
        library.load().bastion_gated_delta_commit(ctypes.byref(args))


def short_conv_commit(op: ShortConvCommit) -> None:
    """One unit of work per request and layer."""
    first = op.states.first
    for paths in _commits(op):
        args = _ConvCommitArgs(
            paths, first.shape[1], first.shape[2], _numbers(op.x), *op.x.stride()[:2],
            FORMATS[first.dtype], *first.stride(),
        )  # fmt: skip
        library.load().bastion_short_conv_commit(ctypes.byref(args))
