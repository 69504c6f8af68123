# SPDX-License-Identifier: Apache-2.0
"""x @ weight.T in bfloat16 or int8, with a weight packed once for vector registers."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.library import Library

from bastion_kernels.cpu import library

_COLUMNS = 16  # of a packed block
_PART = 4096  # rows of a weight rounded at once, in fp32


@lru_cache
def can_multiply() -> bool:
    """Whether bf16 products of few rows are fast here: AVX-512 BF16 without AMX, or AVX2 alone.

    With AMX oneDNN is faster. Other CPUs with AVX-512 were not measured.
    """
    if torch.cpu._is_avx512_supported():
        return can_multiply_int8() and not torch.cpu._is_amx_tile_supported()
    return torch.cpu._is_avx2_supported() and _is_compiled()


@lru_cache
def can_multiply_int8() -> bool:
    """Whether this CPU has AVX-512 BF16 and VNNI."""
    if not (torch.cpu._is_avx512_bf16_supported() and torch.cpu._is_vnni_supported()):
        return False
    return _is_compiled()


def _is_compiled() -> bool:
    """Whether the library has the op: an old compiler may lack the instructions."""
    return library.problem() is None and hasattr(library.load(), "bastion_register_linear")


class PackedWeight(NamedTuple):
    """A weight [N, K] of w bytes, packed for `linear_cpu`.

    Words of 4 bytes of K are interleaved for 16 columns, as one instruction multiplies them.
    """

    values: Tensor  # [N / 16, w K / 4, 64 / w] bf16 or int8
    # In int8: [N] int32, which correct x, stored unsigned and 128 too large.
    start: Tensor | None = None
    scales: Tensor | None = None  # in int8: [N] float32


def pack_weight(weight: Tensor, *, int8: bool = False) -> PackedWeight | None:
    """Pack a weight [N, K] bf16, rounded to int8 or not; None if N or K does not divide."""
    outer, inner = weight.shape
    word = 4 if int8 else 2
    if outer % _COLUMNS or inner % word:
        return None
    _implement()
    start = scales = None
    if int8:
        weight, scales = round_rows(weight)
        start = -128 * weight.sum(1, dtype=torch.int32)
    packed = weight.view(outer // _COLUMNS, _COLUMNS, inner // word, word).transpose(1, 2)
    values = packed.reshape(outer // _COLUMNS, inner // word, word * _COLUMNS)
    return PackedWeight(values, start, scales)


def round_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight: [N, K] -> rounded [N, K] int8, and the scales [N] float32 of its rows."""
    scales = weight.abs().amax(1).float().clamp_(min=1e-12).div_(127)
    rounded = torch.empty(weight.shape, dtype=torch.int8)
    for first in range(0, len(weight), _PART):
        part = slice(first, first + _PART)
        rounded[part] = weight[part].float().div_(scales[part, None]).round_()
    return rounded, scales


# An op, so that compiled models can call it; in C++, because a step calls it for every layer.
_library = Library("bastion", "DEF")
_library.define(
    "linear(Tensor x, Tensor values, Tensor? start, Tensor? scales, Tensor? bias) -> Tensor"
)


def _result(x: Tensor, values: Tensor, *_: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], values.shape[0] * _COLUMNS)


_library.impl("linear", _result, "Meta")


@cache
def _implement() -> None:
    """Register the op's implementation, when the first weight is packed."""
    library.load().bastion_register_linear()


def linear_cpu(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """Products of rows with a weight.

    In bf16 they are summed in float32 in the order of K, and a row's result does not depend on the
    other rows, bit for bit. In int8 each row of x is rounded by its own scale.

    Args:
        x: [.., K] bf16.
        bias: [N] bf16 or None.

    Returns:
        [.., N] bf16.
    """
    values, start, scales = weight
    if bias is None or scales is None:
        out: Tensor = torch.ops.bastion.linear(x, values, start, scales, bias)
        return out
    return torch.ops.bastion.linear(x, values, start, scales, None) + bias
