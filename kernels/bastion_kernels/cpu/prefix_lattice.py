# SPDX-License-Identifier: Apache-2.0
"""A lattice of prefixes on a CPU, all depths in one call; the kernel is `csrc/prefixes.cpp`."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from bastion_kernels.cpu import library
from bastion_kernels.cpu.linear import pack_weight

if TYPE_CHECKING:
    from bastion_kernels.draft.prefix_lattice import PrefixHead, RecurrentLattice

_COLUMNS = 16  # of a packed block

__all__ = ["pack_head", "recurrent_lattice"]

PrefixArgs = library.struct(
    "PrefixArgs",
    "threads half tiles reqs depth width candidates hidden_words state rank_columns "
    "last_words top_k corrected_from *tokens *embedded *of_input *of_state *projection "
    "*positions *last *ids *base *logprobs *rows",
)


def _pad(weight: Tensor, rows: int, columns: int) -> Tensor:
    """Zeros after the last two axes, up to multiples."""
    return F.pad(weight, (0, -weight.shape[-1] % columns, 0, -weight.shape[-2] % rows))


def _packed(weight: Tensor) -> Tensor:
    """A weight [N, K] of any size, padded and packed by `pack_weight`."""
    packed = pack_weight(_pad(weight, _COLUMNS, 4 // weight.element_size()))
    assert packed is not None
    return packed.contiguous()


def pack_head(head: PrefixHead) -> tuple[Tensor, ...]:
    """Weights of a position's hidden state `[E, H]`, E rounded up to 16, then packed ones: of a
    token's embedding, of the old state, and of the new state. float16 becomes float32."""
    size, hidden = head.weight_hh.shape[1], head.weight_ih.shape[1]
    whole = [head.weight_ih, head.weight_hh, head.first]
    if head.first.dtype != torch.bfloat16:
        whole = [weight.float() for weight in whole]
    of_input, of_state, first = whole
    gates = (
        _packed(_pad(weight.reshape(3, size, -1), _COLUMNS, 1).flatten(0, 1))
        for weight in (of_input, of_state)
    )
    of_hidden = _pad(head.first[:, :hidden], _COLUMNS, 1).contiguous()
    return of_hidden, *gates, _packed(first[:, hidden:])


def recurrent_lattice(op: RecurrentLattice) -> None:
    """All depths in one call."""
    reqs, depth, width, candidates = op.out.rows.shape
    of_hidden, of_input, of_state, projection = op.prepared
    kind, word = of_input.dtype, 4 // of_input.element_size()
    tokens = torch.cat([op.anchors.view(reqs, 1).long(), op.tokens.reshape(reqs, -1).long()], dim=1)
    embedded = _pad(op.embed(tokens.view(-1)).to(kind), 1, word).contiguous()
    last, ids = op.head.last, op.ids.int().contiguous()
    if last.dtype != kind or last.shape[1] % word or not last.is_contiguous():
        last = _pad(F.embedding(ids.flatten(), last).to(kind), 1, word)
        ids = torch.arange(ids.numel(), dtype=torch.int32)
    positions, base = F.linear(op.hidden, of_hidden).float(), op.base.contiguous()
    args = PrefixArgs(
        torch.get_num_threads(), kind == torch.bfloat16,
        kind == torch.bfloat16 and library.has_tiles(), reqs, depth, width, candidates,
        embedded.shape[1] // word, op.head.weight_hh.shape[1], of_hidden.shape[0],
        last.shape[1] // word, op.top_k, op.head.corrected_from, tokens.data_ptr(),
        embedded.data_ptr(), of_input.data_ptr(), of_state.data_ptr(), projection.data_ptr(),
        positions.data_ptr(), last.data_ptr(), ids.data_ptr(), base.data_ptr(),
        op.out.logprobs.data_ptr(), op.out.rows.data_ptr(),
    )  # fmt: skip
    library.load().bastion_score_prefixes(ctypes.byref(args))
