# SPDX-License-Identifier: Apache-2.0
"""What `name_cpu` versions are made with: Numba where there is one, and memory that is kept.

Results must equal the references' bit for bit, so there is no fastmath but where an op says so.
Functions that call each other live in one file, because Numba's cache looks at one file only.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "HAVE_NUMBA", "compile_for_threads", "inner", "njit", "on_all_threads", "scratch",
    "scratch_lines", "told",
]  # fmt: skip

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


def inner(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compile as a part of what `compile_for_threads` compiles and keeps."""
    return numba.njit(function, nogil=True, error_model="numpy", **options)


def compile_for_threads(function: Callable[[Any], None], *modules: ModuleType) -> Any:
    """Compile a function of one pointer for `on_all_threads`, now or from Numba's cache.

    modules: where the parts are; cached code is used while all of them are as they were.
    """
    sources = b"".join(Path(str(module.__file__)).read_bytes() for module in modules)
    function.__qualname__ += "_" + sha256(sources).hexdigest()[:12]
    options = {"nogil": True, "error_model": "numpy"}
    signature = numba.types.void(numba.types.voidptr)
    try:
        return numba.cfunc(signature, cache=True, **options)(function).ctypes
    except RuntimeError:  # see `njit`
        return numba.cfunc(signature, **options)(function).ctypes


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
