# SPDX-License-Identifier: Apache-2.0
"""What `name_cpu` versions are made with: Numba where there is one, and memory that is kept.

Results must equal the references' bit for bit, so there is no fastmath but where an op says so.
Functions that call each other live in one file, because Numba's cache looks at one file only.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["HAVE_NUMBA", "njit", "scratch"]

try:
    import numba

    HAVE_NUMBA = True
except ImportError:
    HAVE_NUMBA = False


def njit(function: Callable[..., Any], *, folder: str = "", **options: Any) -> Callable[..., Any]:
    """Compile at the first call with each combination of types; as it is without Numba.

    The machine code is kept in NUMBA_CACHE_DIR, or else in `folder`, or else beside the file, or
    where that cannot be written in the user's cache folder. A division by zero gives what IEEE
    says, as on a device; the GIL is released.
    """
    if not HAVE_NUMBA:
        return function
    options = {"cache": True, "nogil": True, "error_model": "numpy"} | options
    user = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = user or folder
    try:
        return numba.njit(function, **options)
    except RuntimeError:  # no folder at all can be written: compiled by every process
        return numba.njit(function, **options | {"cache": False})
    finally:
        numba.config.CACHE_DIR = user


_kept = threading.local()


def scratch(dtype: torch.dtype, *shape: int) -> Tensor:
    """Uninitialised memory of this thread, valid until its next call with the same dtype.

    Fresh memory of this size costs a page fault every 4 KiB, which can take longer than the work.
    """
    buffers: dict[torch.dtype, Tensor] = _kept.__dict__.setdefault("buffers", {})
    size = math.prod(shape)
    buffer = buffers.get(dtype)
    if buffer is None or buffer.numel() < size:
        buffer = buffers[dtype] = torch.empty(size * 5 // 4, dtype=dtype)
    return buffer[:size].view(shape)
