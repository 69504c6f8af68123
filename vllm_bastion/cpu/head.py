# SPDX-License-Identifier: Apache-2.0
"""A drafter's output head in int8, on a CPU that multiplies int8."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn
from vllm import _custom_ops as ops

from bastion_kernels.cpu.linear import Int8Weight, linear_int8_cpu, round_rows
from vllm_bastion.cpu.int8 import takes_our_product
from vllm_bastion.cpu.linear import PRIMITIVES, Room

# Columns that oneDNN multiplies at once. Given 151,936 of them, its time grows with the rows of x:
# 240 rows of 1,024 take 73 ms, and 20 ms in parts (two-core Xeon with AMX).
_PART = 16384


class Int8Head:
    """x [.., K] bf16 -> logits [.., N] bf16, valid until the next call.

    Args:
        weight: [N, K] bf16, copied. Each of its rows has a scale, and so has each row of x.
    """

    def __init__(self, weight: Tensor) -> None:
        self._columns = len(weight)
        self._logits = Room(self._columns)
        self._ours = Int8Weight(weight) if takes_our_product(weight) else None
        if self._ours is not None:
            return
        rounded, self._scales = round_rows(weight)  # oneDNN reads the scales in place
        self._part = Room(_PART)
        self._handlers = [
            ops.create_onednn_scaled_mm(part.t(), scales, weight.dtype, True, False, PRIMITIVES)
            for part, scales in zip(rounded.split(_PART), self._scales.split(_PART), strict=True)
        ]

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out = self._logits.of(len(rows), self._columns)
        if self._ours is not None:
            linear_int8_cpu(rows, self._ours.values, self._ours.start, self._ours.scales, out)
        else:
            self._multiply_in_parts(rows, out)
        out = out.view(*x.shape[:-1], self._columns)
        return out if bias is None else out + bias

    def _multiply_in_parts(self, rows: Tensor, out: Tensor) -> None:
        values, row_scales, _ = ops.onednn_scaled_int8_quant(rows)
        for handler, columns in zip(self._handlers, out.split(_PART, dim=1), strict=True):
            part = self._part.of(*columns.shape)  # oneDNN writes contiguous results only
            ops.onednn_scaled_mm(handler, values, part, row_scales, None, None, None)
            columns.copy_(part)


def install_int8_head(model: nn.Module) -> None:
    """Make a drafter's head multiply in int8: a copy, if its weight is the target's."""
    head: Any = model.lm_head
    if not getattr(model, "has_own_lm_head", False):
        head = copy.copy(head)
    head.cpu_linear = Int8Head(head.weight.data)
    model.lm_head = head


def int8_head(layer: Any) -> Int8Head | None:
    """The layer's product if it is one of these."""
    product = vars(layer).get("cpu_linear")
    return product if isinstance(product, Int8Head) else None
