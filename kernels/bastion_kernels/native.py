# SPDX-License-Identifier: Apache-2.0
"""Numba where there is one: what `name_cpu` versions of small ops are compiled with.

Results must equal the references' bit for bit, so there is no fastmath but where an op says so.
Functions that call each other live in one file, because Numba's cache looks at one file only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["HAVE_NUMBA", "njit"]

try:
    import numba

    HAVE_NUMBA = True
except ImportError:
    HAVE_NUMBA = False


def njit(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Compile at the first call and keep the code in Numba's cache; as it is without Numba.

    Numba caches beside the file, or where that cannot be written in the user's cache folder, or in
    NUMBA_CACHE_DIR.
    """
    if not HAVE_NUMBA:
        return function
    options = {"nogil": True, "error_model": "numpy"} | options
    try:
        return numba.njit(function, cache=True, **options)
    except RuntimeError:  # no folder at all can be written: compiled by every process
        return numba.njit(function, **options)
