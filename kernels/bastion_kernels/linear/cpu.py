# SPDX-License-Identifier: Apache-2.0
"""x @ weight.T for bfloat16, over a weight that is packed once for vector registers."""

from __future__ import annotations

import threading

import numpy as np
import torch
from torch import Tensor

from bastion_kernels.native import HAVE_NUMBA, on_all_threads

if HAVE_NUMBA:
    from bastion_kernels.linear.cpu_kernel import CALL, COLUMNS, compiled, rows_at_once

_calls = threading.local()

__all__ = ["can_multiply", "linear_cpu", "pack_weight"]


def can_multiply() -> bool:
    """Whether this CPU has the instructions, and none that are better."""
    return (
        HAVE_NUMBA
        and torch.cpu._is_avx512_bf16_supported()
        and not torch.cpu._is_amx_tile_supported()
    )


def pack_weight(weight: Tensor) -> Tensor | None:
    """weight: [N, K] bf16 -> [N / 16, K / 2, 32] bf16, or None for sizes that do not divide so.

    Pairs of neighbours in K for 16 columns at a time, as one instruction multiplies them.
    """
    outer, inner = weight.shape
    if outer % COLUMNS or inner % 2:
        return None
    packed = weight.view(outer // COLUMNS, COLUMNS, inner // 2, 2).transpose(1, 2)
    return packed.reshape(outer // COLUMNS, inner // 2, 2 * COLUMNS)


class _Call:
    """What a thread's calls are told, and the memory that they work in."""

    def __init__(self) -> None:
        self.told = np.zeros(len(CALL.names or ()), np.int64)
        self.address = self.told.ctypes.data
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._scratch = 0

    def scratch(self, size: int) -> int:
        """The address of so many bytes, or more."""
        if self._memory.numel() < size + 64:
            self._memory = torch.empty(size + 64, dtype=torch.uint8)
            self._scratch = -(-self._memory.data_ptr() // 64) * 64
        return self._scratch


def linear_cpu(x: Tensor, packed: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Products of rows with a weight, summed in float32 in the order of K.

    A row gets the same bits whatever rows are beside it.

    Args:
        x: [M, K] bf16, of unit stride in K.
        packed: [N / 16, K / 2, 32] bf16, see `pack_weight`.
        bias: [N] bf16 or None.
        out: [M, N] bf16, contiguous; written.
    """
    rows, inner = x.shape
    threads = torch.get_num_threads()
    at_once, need = rows_at_once(rows, inner)
    call = _calls.__dict__.get("call") or _calls.__dict__.setdefault("call", _Call())
    call.told[:] = (
        0, 0, threads, call.scratch(threads * need), need, at_once, x.data_ptr(), 2 * x.stride(0),
        rows, inner, packed.data_ptr(), packed.shape[0], 0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
    )  # fmt: skip
    on_all_threads(compiled(), call.address, threads)
