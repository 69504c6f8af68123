# SPDX-License-Identifier: Apache-2.0
"""NgramDrafts from the host to the device that wait for nothing."""

from __future__ import annotations

import numpy as np
import torch


def to_device(
    data: np.ndarray,
    *,
    out: torch.Tensor | None = None,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Copy an array to a device without waiting.

    The copy reads its own pinned memory, so `data` may change as soon as this returns.

    Args:
        data: any shape.
        out: tensor to copy into; None: a new one.
        device: of the new tensor.
        dtype: of the new tensor; default: that of `data`.
    """
    target = out.device if out is not None else device
    assert target is not None
    source = torch.from_numpy(data)
    kind = out.dtype if out is not None else (dtype or source.dtype)
    if target.type != "cpu":
        source = torch.empty(source.shape, dtype=kind, pin_memory=True).copy_(source)
    if out is not None:
        return out.copy_(source, non_blocking=True)
    # On a CPU `source` shares the array's memory, which the caller may overwrite.
    return source.to(device=target, dtype=kind, non_blocking=True, copy=target.type == "cpu")
