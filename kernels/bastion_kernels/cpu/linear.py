# SPDX-License-Identifier: Apache-2.0
"""x @ weight.T in bfloat16 or int8, with a weight packed once for vector registers."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

from bastion_kernels.cpu import library

_COLUMNS = 16  # of a packed block
_PART = 4096  # rows of a weight rounded at once, in fp32

__all__ = [
    "Int8Weight", "can_multiply", "can_multiply_int8", "linear_cpu", "linear_int8_cpu",
    "pack_weight",
]  # fmt: skip

LinearArgs = library.struct(
    "LinearArgs", "threads rows words blocks *x x_row *packed *bias *start *scales *out"
)


@lru_cache
def can_multiply() -> bool:
    """Whether this CPU has AVX-512 BF16 but no AMX (oneDNN is faster with AMX)."""
    return can_multiply_int8() and not torch.cpu._is_amx_tile_supported()


@lru_cache
def can_multiply_int8() -> bool:
    """Whether this CPU has AVX-512 BF16 and VNNI."""
    if not (torch.cpu._is_avx512_bf16_supported() and torch.cpu._is_vnni_supported()):
        return False
    # An old compiler may lack the instructions.
    return library.problem() is None and hasattr(library.load(), "bastion_linear")


def pack_weight(weight: Tensor) -> Tensor | None:
    """weight: [N, K] of w bytes -> [N / 16, w K / 4, 64 / w], or None if N or K does not divide.

    Words of 4 bytes of K, interleaved for 16 columns, as one instruction multiplies them.
    """
    outer, inner = weight.shape
    word = 4 // weight.element_size()
    if outer % _COLUMNS or inner % word:
        return None
    packed = weight.view(outer // _COLUMNS, _COLUMNS, inner // word, word).transpose(1, 2)
    return packed.reshape(outer // _COLUMNS, inner // word, word * _COLUMNS)


class Int8Weight:
    """A weight [N, K] bf16 (not kept), rounded and packed for `linear_int8_cpu`.

    Raises:
        ValueError: N is not a multiple of 16, or K not of 4.
    """

    def __init__(self, weight: Tensor) -> None:
        rounded, self.scales = round_rows(weight)
        values = pack_weight(rounded)
        if values is None:
            raise ValueError(f"a weight of {tuple(weight.shape)} cannot be packed")
        self.values = values
        # corrects x, which is stored unsigned, 128 too large
        self.start = -128 * rounded.sum(1, dtype=torch.int32)


def round_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight: [N, K] -> rounded [N, K] int8, and the scales [N] float32 of its rows."""
    scales = weight.abs().amax(1).float().clamp_(min=1e-12).div_(127)
    rounded = torch.empty(weight.shape, dtype=torch.int8)
    for first in range(0, len(weight), _PART):
        part = slice(first, first + _PART)
        rounded[part] = weight[part].float().div_(scales[part, None]).round_()
    return rounded, scales


def linear_cpu(x: Tensor, packed: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Products of rows with a weight, summed in float32 in the order of K.

    A row's result does not depend on the other rows, bit for bit.

    Args:
        x: [M, K] bf16, of unit stride in K.
        packed: [N / 16, K / 2, 32] bf16, see `pack_weight`.
        bias: [N] bf16 or None.
        out: [M, N] bf16, contiguous; written.
    """
    _multiply(x, packed, bias, None, None, out)


def linear_int8_cpu(x: Tensor, values: Tensor, start: Tensor, scales: Tensor, out: Tensor) -> None:
    """Products of rows, each rounded to int8 by its own scale, with an `Int8Weight`'s parts.

    Args:
        x: [M, K] bf16, of unit stride in K.
        values: [N / 16, K / 4, 64] int8.
        start: [N] int32.
        scales: [N] float32.
        out: [M, N] bf16, contiguous; written.
    """
    _multiply(x, values, None, start, scales, out)


def _multiply(
    x: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    start: Tensor | None,
    scales: Tensor | None,
    out: Tensor,
) -> None:
    columns = (None if tensor is None else tensor.data_ptr() for tensor in (bias, start, scales))
    args = LinearArgs(
        torch.get_num_threads(), x.shape[0], packed.shape[1], packed.shape[0], x.data_ptr(),
        x.stride(0), packed.data_ptr(), *columns, out.data_ptr(),
    )  # fmt: skip
    library.load().bastion_linear(ctypes.byref(args))
