# SPDX-License-Identifier: Apache-2.0
"""Triton, or a stand-in with which kernels are defined and never launched.

A CPU host needs no Triton: every op has another version. With the stand-in the package imports, and
launching a kernel raises ImportError.
"""

from __future__ import annotations

from typing import Any

__all__ = ["tl", "triton"]


class _NoTriton:
    """Any attribute, any decorator; no launch."""

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
