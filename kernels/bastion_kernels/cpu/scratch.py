# SPDX-License-Identifier: Apache-2.0
"""Memory that a thread reuses between calls."""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor

__all__ = ["scratch"]

_local = threading.local()


def scratch(dtype: torch.dtype, *shape: int) -> Tensor:
    """Uninitialised memory of this thread, valid until its next call with the same dtype.

    Fresh memory costs a page fault every 4 KiB, which can take longer than the work.
    """
    buffers: dict[torch.dtype, Tensor] = _local.__dict__.setdefault("buffers", {})
    size = math.prod(shape)
    buffer = buffers.get(dtype)
    if buffer is None or buffer.numel() < size:
        buffer = buffers[dtype] = torch.empty(size * 5 // 4, dtype=dtype)
    return buffer[:size].view(shape)
