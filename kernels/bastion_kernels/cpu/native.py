# SPDX-License-Identifier: Apache-2.0
"""What the CPU versions share: Numba, PyTorch's threads and scratch memory.

Results equal the references' bit for bit, so there is no fastmath except where an op says so.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bastion_kernels.cpu.cache import compile_callback

__all__ = [
    "HAVE_NUMBA", "compile_for_threads", "inner", "on_all_threads", "scratch",
    "scratch_lines", "told",
]  # fmt: skip

try:
    import numba

    HAVE_NUMBA = True
except ImportError:
    HAVE_NUMBA = False


def inner(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compile as a part of what `compile_for_threads` compiles and keeps."""
    return numba.njit(function, nogil=True, error_model="numpy", **options)


def compile_for_threads(function: Callable[[Any], None]) -> Any:
    """Compile a function of one pointer for `on_all_threads`, now or from the cache."""
    return compile_callback(function, numba.types.voidptr)


def _find_parallel() -> Any:
    """OpenMP's "run this on a team of threads", of the library whose threads are PyTorch's."""
    try:
        library = ctypes.CDLL(None)
        parallel, threads = library.GOMP_parallel, library.omp_get_max_threads
    except (OSError, AttributeError):
        return None
    parallel.restype, parallel.argtypes = None, [ctypes.c_void_p] * 2 + [ctypes.c_uint] * 2
    return parallel if threads() == torch.get_num_threads() else None


_parallel = _find_parallel()


def runs_on_all_threads() -> bool:
    """Whether `on_all_threads` reaches as many threads as PyTorch has."""
    return _parallel is not None or torch.get_num_threads() == 1


def on_all_threads(run: Any, told: int, threads: int) -> None:
    """Call what `compile_for_threads` gave with an address, once on each of so many threads.

    They are the threads of PyTorch's and vLLM's own OpenMP loops: others beside them would wait for
    a core on which one of these still spins. Without GNU's or Intel's OpenMP it is called once.
    """
    if _parallel is None or threads == 1:
        run(told)
    else:
        _parallel(ctypes.cast(run, ctypes.c_void_p), told, threads, 0)


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


def scratch_lines(size: int) -> int:
    """The address of so many bytes at the start of a cache line, valid until the next call."""
    kept: tuple[int, int, Tensor] | None = _kept.__dict__.get("lines")
    if kept is None or kept[0] < size:
        memory = torch.empty(size + 64, dtype=torch.uint8)
        kept = _kept.lines = size, -(-memory.data_ptr() // 64) * 64, memory
    return kept[1]


def told(function: str, size: int) -> tuple[np.ndarray, int]:
    """[size] int64 that a function of `compile_for_threads` is told by, and where; this thread's.

    An array's address takes NumPy longer to find than a small call takes.
    """
    kept: dict[str, tuple[np.ndarray, int]] = _kept.__dict__.setdefault("told", {})
    if function not in kept:
        numbers = np.zeros(size, np.int64)
        kept[function] = numbers, numbers.ctypes.data
    return kept[function]
