# SPDX-License-Identifier: Apache-2.0
"""Gated delta layers over trees on a CPU.

`GatedDeltaLayer` runs a layer's convolution, normalisation and recurrence in one call, which is
what `short_conv_tree` and `gated_delta_tree` do on a GPU with a kernel of vLLM's in between. As in
`cpu.attention`, what belongs to the layer and what belongs to the step is put together once each.
The kernels are `csrc/gated_delta.cpp` and `csrc/gated_delta_commit.cpp`.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

from bastion_kernels.cpu import library
from bastion_kernels.cpu.attention import FORMATS
from bastion_kernels.gated_delta.recurrence import GatedDeltaCommit
from bastion_kernels.gated_delta.short_conv import ShortConvCommit
from bastion_kernels.gated_delta.states import LayerStates

__all__ = [
    "GatedDeltaLayer", "GatedDeltaStep", "gated_delta_commit", "serves", "short_conv_commit",
]  # fmt: skip

_int, _address, _float = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float


class _Numbers(ctypes.Structure):
    """`Numbers` of csrc/gated_delta.h."""

    _fields_ = (("data", _address), ("format", _int))


class _LayerArgs(ctypes.Structure):
    """`DeltaLayerArgs` of csrc/gated_delta.h."""

    _fields_ = (
        ("heads", _int), ("key_heads", _int), ("dim", _int), ("width", _int), ("taps", _int),
        ("format", _int), ("weight", _Numbers), ("weight_channel", _int), ("weight_tap", _int),
        ("inputs", _Numbers), ("inputs_place", _int), ("inputs_channel", _int),
        ("inputs_column", _int), ("state", _Numbers), ("state_place", _int), ("state_head", _int),
        ("state_key", _int), ("state_value", _int), ("decay_log", _Numbers),
        ("decay_bias", _Numbers), ("max_rows", _int), ("saved_inputs", _address),
        ("saved_keys", _address), ("updates", _address), ("decays", _address), ("scale", _float),
    )  # fmt: skip


class _StepArgs(ctypes.Structure):
    """`DeltaStepArgs` of csrc/gated_delta.h."""

    _fields_ = (
        ("requests", _int), ("places", _address), ("starts", _address), ("tails", _address),
        ("slots", _address), ("parents", _address), ("parents_slot", _int), ("rows", _address),
    )  # fmt: skip


class _RowsArgs(ctypes.Structure):
    """`DeltaRowsArgs` of csrc/gated_delta.h."""

    _fields_ = (
        ("threads", _int), ("mixed", _address), ("mixed_row", _int), ("b", _address),
        ("b_row", _int), ("a", _address), ("a_row", _int), ("out", _address), ("out_row", _int),
        ("out_head", _int),
    )  # fmt: skip


class _CommitArgs(ctypes.Structure):
    """`CommitArgs` of csrc/gated_delta.h."""

    _fields_ = (
        ("threads", _int), ("layers", _int), ("requests", _int), ("table", _address),
        ("places", _address), ("places_group", _int), ("into", _address), ("into_group", _int),
        ("starts", _address), ("logits", _address), ("path", _address), ("path_row", _int),
        ("depths", _int),
    )  # fmt: skip


class _DeltaCommitArgs(ctypes.Structure):
    """`DeltaCommitArgs` of csrc/gated_delta.h."""

    _fields_ = (
        ("paths", _CommitArgs), ("heads", _int), ("key_heads", _int), ("dim", _int),
        ("width", _int), ("keys", _Numbers), ("keys_layer", _int), ("keys_row", _int),
        ("keys_head", _int), ("updates", _address), ("updates_layer", _int), ("decays", _address),
        ("decays_layer", _int), ("state_format", _int), ("state_place", _int),
        ("state_head", _int), ("state_key", _int), ("state_value", _int),
    )  # fmt: skip


class _ConvCommitArgs(ctypes.Structure):
    """`ConvCommitArgs` of csrc/gated_delta.h."""

    _fields_ = (
        ("paths", _CommitArgs), ("channels", _int), ("kept", _int), ("inputs", _Numbers),
        ("inputs_layer", _int), ("inputs_row", _int), ("state_format", _int),
        ("state_place", _int), ("state_channel", _int), ("state_column", _int),
    )  # fmt: skip


def _numbers(tensor: Tensor) -> _Numbers:
    return _Numbers(tensor.data_ptr(), FORMATS[tensor.dtype])


@lru_cache
def serves(*dtypes: torch.dtype) -> bool:
    """Whether the kernels take numbers of these dtypes, and can be compiled here."""
    return all(dtype in FORMATS for dtype in dtypes) and library.problem() is None


class GatedDeltaStep:
    """The requests of a step, for every layer; as in `gated_delta_tree`, and besides:

    Args:
        parents: `[S, N]` int32, node number of each column's parent.
        rows: `[n]` int64, where the n tree rows are among the step's; None where all are.
    """

    def __init__(
        self,
        state_rows: Tensor,
        query_start_loc: Tensor,
        tail_lens: Tensor,
        slots: Tensor,
        parents: Tensor,
        rows: Tensor | None = None,
    ) -> None:
        # The arguments hold addresses only.
        self._tensors = state_rows, query_start_loc, tail_lens, slots, parents, rows
        self.args = _StepArgs(
            state_rows.shape[0], state_rows.data_ptr(), query_start_loc.data_ptr(),
            tail_lens.data_ptr(), slots.data_ptr(), parents.data_ptr(), parents.stride(0),
            None if rows is None else rows.data_ptr(),
        )  # fmt: skip


class GatedDeltaLayer:
    """A layer with its states, and what its steps save for the commit.

    Args:
        weight: `[C, W]`; channels are of queries, keys and values.
        decay_log: `[H]`, the model's A_log.
        decay_bias: `[H]`, its dt_bias.
        conv_state: `[B, C, W - 1]`, oldest input first.
        state: `[B, H, K, V]`.
        conv_input: `[M, C]`, what `short_conv_commit` takes of this layer; written.
        key: `[M, Hk, K]`, as `gated_delta_commit` takes it; written, as the next two.
        updates: `[M, H, V]` float32.
        decays: `[M, H]` float64.
        scale: factor of the output.
    """

    def __init__(
        self,
        weight: Tensor,
        decay_log: Tensor,
        decay_bias: Tensor,
        conv_state: Tensor,
        state: Tensor,
        conv_input: Tensor,
        key: Tensor,
        updates: Tensor,
        decays: Tensor,
        scale: float,
    ) -> None:
        # The arguments hold addresses only.
        self._tensors = (
            weight, decay_log, decay_bias, conv_state, state, conv_input, key, updates, decays,
        )  # fmt: skip
        self._addresses = [tensor.data_ptr() for tensor in self._tensors[:5]]
        heads, width = updates.shape[1:]
        self._args = _LayerArgs(
            heads, *key.shape[1:], width, weight.shape[1], FORMATS[key.dtype],
            _numbers(weight), *weight.stride(), _numbers(conv_state), *conv_state.stride(),
            _numbers(state), *state.stride(), _numbers(decay_log), _numbers(decay_bias),
            key.shape[0], conv_input.data_ptr(), key.data_ptr(), updates.data_ptr(),
            decays.data_ptr(), scale,
        )  # fmt: skip
        self._run = library.load().bastion_gated_delta

    def has(self, *tensors: Tensor) -> bool:
        """Whether the first five tensors are where these are: a model may get other memory."""
        return self._addresses == [tensor.data_ptr() for tensor in tensors]

    def __call__(
        self, step: GatedDeltaStep, mixed: Tensor, b: Tensor, a: Tensor, out: Tensor
    ) -> None:
        """mixed: `[T, C]`; b, a: `[T, H]`; out: `[T, H, V]`, written; all of the key's dtype.

        The last dimension of `out` is contiguous.
        """
        mixed, b, a = (x if x.stride(-1) == 1 else x.contiguous() for x in (mixed, b, a))
        rows = _RowsArgs(
            torch.get_num_threads(), mixed.data_ptr(), mixed.stride(0), b.data_ptr(), b.stride(0),
            a.data_ptr(), a.stride(0), out.data_ptr(), *out.stride()[:2],
        )  # fmt: skip
        self._run(ctypes.byref(self._args), ctypes.byref(step.args), ctypes.byref(rows))


def _commit_args(op: GatedDeltaCommit | ShortConvCommit) -> tuple[_CommitArgs, tuple[Tensor, ...]]:
    """The arguments of both commits, and tensors that must live until the call returns."""
    path, states = op.path, op.states
    rows = [x.to(torch.int32) for x in (op.state_rows, op.into_rows)]
    args = _CommitArgs(
        torch.get_num_threads(), len(states.states), path.shape[0], states.table.data_ptr(),
        rows[0].data_ptr(), rows[0].stride(0), rows[1].data_ptr(), rows[1].stride(0),
        op.query_start_loc.data_ptr(), op.cu_num_logits.data_ptr(), path.data_ptr(),
        path.stride(0), path.shape[1],
    )  # fmt: skip
    return args, tuple(rows)


def _has(states: LayerStates, *tensors: Tensor) -> bool:
    return serves(states.first.dtype, *(tensor.dtype for tensor in tensors))


def gated_delta_commit(op: GatedDeltaCommit) -> None:
    """A head of a layer's states at a time."""
    if not _has(op.states, op.key):
        op.reference()
        return
    paths, _rows = _commit_args(op)
    first = op.states.first
    args = _DeltaCommitArgs(
        paths, op.updates.shape[2], *op.key.shape[2:], op.updates.shape[3], _numbers(op.key),
        *op.key.stride()[:3], op.updates.data_ptr(), op.updates.stride(0), op.decays.data_ptr(),
        op.decays.stride(0), FORMATS[first.dtype], *first.stride(),
    )  # fmt: skip
    library.load().bastion_gated_delta_commit(ctypes.byref(args))


def short_conv_commit(op: ShortConvCommit) -> None:
    """A request of a layer at a time."""
    if not _has(op.states, op.x):
        op.reference()
        return
    paths, _rows = _commit_args(op)
    first = op.states.first
    args = _ConvCommitArgs(
        paths, first.shape[1], first.shape[2], _numbers(op.x), *op.x.stride()[:2],
        FORMATS[first.dtype], *first.stride(),
    )  # fmt: skip
    library.load().bastion_short_conv_commit(ctypes.byref(args))
