# SPDX-License-Identifier: Apache-2.0
"""Triton, or a stand-in that lets the package be imported without it.

A CPU host needs no Triton, because every op has a CPU version. With the stand-in, a launch raises
ImportError.
"""

from __future__ import annotations

from typing import Any

__all__ = ["tl", "triton"]


class _NoTriton:
    """Accepts any attribute and any decorator; refuses to launch."""

    def __getattr__(self, name: str) -> _NoTriton:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> _NoTriton:
        return self

    def __getitem__(self, grid: Any) -> Any:
        raise ImportError("this kernel needs Triton, which is not installed: `pip install triton`")


try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = _NoTriton()
