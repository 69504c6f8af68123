# SPDX-License-Identifier: Apache-2.0
"""A wrapper that lets Model Runner V2 run on a CPU host, where Triton has no back end."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def rebind_kernels(original: Callable[..., None], overrides: Any) -> None:
    """Let vLLM's scan of all modules get past llvmlite.

    llvmlite's library object has no `__dict__`. A look-up of `__dict__` on it searches for a C
    function of that name; an entry in its table of functions is found first.
    """
    if (ffi := sys.modules.get("llvmlite.binding.ffi")) is not None:
        functions = getattr(ffi.lib, "_fntab", None)
        if isinstance(functions, dict):
            functions.setdefault("__dict__", {})
    original(overrides)
