# SPDX-License-Identifier: Apache-2.0
"""The acceptance walk of requests at temperature 0 whose logits nothing processes, in one call.

Their token is the argmax of the row, so walk and argmax are one loop, and a row that the walk does
not visit is never read.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vllm_bastion.cpu.compiled import compiled

_BLOCK = 512  # logits whose largest is found before it is located


@compiled
def _argmax(row):  # type: ignore[no-untyped-def]
    """The first of the largest; a NaN is larger than any. row: [V] fp32."""
    best, at = row[0], 0
    for start in range(0, row.shape[0], _BLOCK):
        end = min(start + _BLOCK, row.shape[0])
        top, nans = row[start], 0
        for i in range(start, end):
            value = row[i]
            top = value if value > top else top
            nans += value != value
        if nans:
            for i in range(start, end):
                if row[i] != row[i]:
                    return i
        if top > best:
            best = top
            for i in range(start, end):
                if row[i] == top:
                    at = i
                    break
    return at


@compiled
def _argmax_bf16(row):  # type: ignore[no-untyped-def]
    """The same of bf16's bits, [V] int16."""
    best, at = np.int16(-32768), 0
    for start in range(0, row.shape[0], _BLOCK):
        end = min(start + _BLOCK, row.shape[0])
        top, size = np.int16(-32768), np.int16(0)
        for i in range(start, end):
            # Integers in the order of the floats; -0.0 is 0.0.
            bits = row[i] if row[i] != -32768 else np.int16(0)
            order = np.int16(bits ^ ((bits >> np.int16(15)) & np.int16(0x7FFF)))
            top = max(top, order)
            size = max(size, np.int16(bits & np.int16(0x7FFF)))
        if size > 0x7F80:
            for i in range(start, end):
                if (row[i] & 0x7FFF) > 0x7F80:
                    return i
        if top > best:
            best = top
            for i in range(start, end):
                bits = row[i] if row[i] != -32768 else np.int16(0)
                if np.int16(bits ^ ((bits >> np.int16(15)) & np.int16(0x7FFF))) == top:
                    at = i
                    break
    return at


def _walk_with(argmax):  # type: ignore[no-untyped-def]
    def walk(  # type: ignore[no-untyped-def]
        logits, node_ids, parents, slots, starts, out_path, out_tokens, num_sampled
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
                token = argmax(logits[start + node])
                out_path[r, depth], out_tokens[r, depth] = node, token
                num_sampled[r] = depth + 1
                # Columns of a node's children lie behind its own.
                above, node = node, -1
                for column in range(above, nodes):
                    if parents[slot, column] == above and node_ids[start + 1 + column] == token:
                        node = column + 1
                        break

    return compiled(walk)


_walk, _walk_bf16 = _walk_with(_argmax), _walk_with(_argmax_bf16)

SERVED = (torch.float32, torch.bfloat16)
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
    half = logits.dtype == torch.bfloat16
    (_walk_bf16 if half else _walk)(
        (logits.view(torch.int16) if half else logits).numpy(), node_ids.numpy(), parents.numpy(),
        slots.numpy(), cu_num_logits.numpy(), out_path.numpy(), out_tokens.numpy(),
        num_sampled.numpy(),
    )  # fmt: skip
