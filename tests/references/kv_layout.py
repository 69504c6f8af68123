# SPDX-License-Identifier: Apache-2.0
"""A CPU's packed KV cache as rows, and the inverse."""

from __future__ import annotations

import torch
from torch import Tensor

from bastion_kernels.attention.kv_layout import KVLayout


def unpacked(kv_cache: Tensor, layout: KVLayout | None) -> Tensor:
    """A cache `[blocks, Hkv, block_size, 2d]` as rows, a copy of the same shape unless it is."""
    return kv_cache if layout is None else kv_cache.flatten(2)[:, :, layout.offsets.long()]


def packed(rows: Tensor, layout: KVLayout) -> Tensor:
    """The inverse of `unpacked`."""
    out = torch.empty_like(rows)
    out.view(*rows.shape[:2], -1)[:, :, layout.offsets.long()] = rows
    return out
