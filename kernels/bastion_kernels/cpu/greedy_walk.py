# SPDX-License-Identifier: Apache-2.0
"""The acceptance walk of requests at temperature 0 whose logits nothing processes, in one call.

Their token is the argmax of the row, so walk and argmax are one loop, and a row that the walk does
not visit is never read.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from bastion_kernels.cpu.cache import njit

_BLOCK = 512  # logits whose largest is found before it is located


@njit
def _order(bits, magnitude):
    """An integer that sorts as the float does; -0.0 is 0.0."""
    kept = bits if bits & magnitude else bits & magnitude
    return kept ^ magnitude if kept < 0 else kept


@njit
def _argmax(row, magnitude, infinity):
    """The first of the largest; a NaN is larger than any.

    row: [V] floats as signed integers of their size; magnitude: all bits but the sign; infinity:
    the bits of +inf, beyond which there are NaNs only.
    """
    integer = row.dtype.type
    best, at = ~magnitude, 0
    for start in range(0, row.shape[0], _BLOCK):
        end = min(start + _BLOCK, row.shape[0])
        top, size = integer(~magnitude), integer(0)
        for i in range(start, end):
            top = max(top, integer(_order(row[i], magnitude)))
            size = max(size, integer(row[i] & magnitude))
        if size > infinity:
            for i in range(start, end):
                if row[i] & magnitude > infinity:
                    return i
        if top > best:
            best = top
            for i in range(start, end):
                if _order(row[i], magnitude) == top:
                    at = i
                    break
    return at


@njit
def _walk(
    logits, magnitude, infinity, node_ids, parents, slots, starts, out_path, out_tokens, num_sampled
):
    out_path[:] = -1
    out_tokens[:] = 0
    for r in range(slots.shape[0]):
        num_sampled[r] = 0
        slot, start, nodes = slots[r], starts[r], starts[r + 1] - starts[r] - 1
        node = 0 if slot >= 0 and nodes >= 0 else -1
        for depth in range(out_path.shape[1]):
            if node < 0:
                break
            token = _argmax(logits[start + node], magnitude, infinity)
            out_path[r, depth], out_tokens[r, depth] = node, token
            num_sampled[r] = depth + 1
            # Columns of a node's children lie behind its own.
            above, node = node, -1
            for column in range(above, nodes):
                if parents[slot, column] == above and node_ids[start + 1 + column] == token:
                    node = column + 1
                    break


# dtype of logits -> integers of its size, and as these: all bits but the sign, +inf
_BITS = {
    torch.float32: (torch.int32, np.int32(0x7FFFFFFF), np.int32(0x7F800000)),
    torch.bfloat16: (torch.int16, np.int16(0x7FFF), np.int16(0x7F80)),
}
SERVED = tuple(_BITS)
"""dtypes of logits"""


def accept_greedily(
    logits: Tensor,
    node_ids: Tensor,
    parents: Tensor,
    slots: Tensor,
    cu_num_logits: Tensor,
    out_path: Tensor,
    out_tokens: Tensor,
    num_sampled: Tensor,
) -> None:
    """`bastion_kernels.accept_path` of every row's argmax.

    Args:
        logits: [L, V] of one of `SERVED`, rows contiguous, on the CPU.
        node_ids, parents, slots, cu_num_logits, out_path, out_tokens, num_sampled: as there.
    """
    integers, magnitude, infinity = _BITS[logits.dtype]
    _walk(
        logits.view(integers).numpy(), magnitude, infinity, node_ids.numpy(), parents.numpy(),
        slots.numpy(), cu_num_logits.numpy(), out_path.numpy(), out_tokens.numpy(),
        num_sampled.numpy(),
    )  # fmt: skip
