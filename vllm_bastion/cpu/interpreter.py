# SPDX-License-Identifier: Apache-2.0
"""Model Runner V2 on a CPU host: vLLM's Triton kernels in Triton's interpreter.

vLLM's CPU build uses Triton only where `triton.backends` has an entry `cpu`, and without Triton it
falls back to the V1 runner, which has none of the hooks we need. An entry with an inactive driver
is enough for vLLM, and Triton's own choice of a driver does not see it; TRITON_INTERPRET makes
every kernel run as Python. Exact and slow, hence only on request
(VLLM_BASTION_TRITON_INTERPRETER=1).
"""

from __future__ import annotations

import functools
import os
import sys
from importlib import metadata
from typing import Any

from vllm_bastion.cpu.build import is_cpu_build


class _InterpreterDriver:
    """Stands where Triton keeps a back end's driver; never active."""

    @staticmethod
    def is_active() -> bool:
        return False


def has_cpu_backend() -> bool:
    """Whether an installed distribution brings a real CPU back end for Triton."""
    return any(ep.name == "cpu" for ep in metadata.entry_points(group="triton.backends"))


def enable() -> bool:
    """Prepare this process, and its children, for the interpreter.

    Returns:
        True where it is on now; False where the host needs none (a CUDA build of vLLM, or a real
        CPU back end of Triton).
    """
    if not is_cpu_build() or has_cpu_backend():
        return False
    # Functions choose between compiler and interpreter when they are decorated, from here on: the
    # variable first, for a Triton that has not been imported yet and for child processes.
    os.environ["TRITON_INTERPRET"] = "1"
    _interpret_triton_library()
    _keep_masks_boolean()
    from triton.backends import Backend, backends

    compiler: Any = None
    driver: Any = _InterpreterDriver
    backends.setdefault("cpu", Backend(compiler, driver))
    return True


def _interpret_triton_library() -> None:
    """Decorate Triton's own functions (tl.sum, tl.max, ...) again if they were imported too early.

    PyTorch imports Triton before vLLM asks for its platform, so that they are bound to the compiler
    by then, and an interpreted kernel cannot call them.
    """
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    interpreted: dict[int, Any] = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "triton":
            continue
        for attribute, value in list(vars(module).items()):
            if type(value) is JITFunction:
                # One object for every name it is re-exported under.
                if id(value) not in interpreted:
                    interpreted[id(value)] = InterpretedFunction(value.fn)
                setattr(module, attribute, interpreted[id(value)])


def _keep_masks_boolean() -> None:
    """Let a scalar comparison be used as a mask, as vLLM's grammar kernel does.

    Triton 3.9's interpreter labels the result of a comparison with the type of what was compared,
    and so spreads a scalar truth value as integers, which its store then refuses.
    """
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    original = InterpreterBuilder.create_splat
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def create_splat(self: Any, ret_ty: Any, arg: Any) -> Any:
        if arg.data.dtype == np.bool_:
            arg = TensorHandle(arg.data, tl.int1)
        return original(self, ret_ty, arg)

    InterpreterBuilder.create_splat = create_splat


def active() -> bool:
    """Whether this process runs vLLM's kernels in the interpreter through this module."""
    module = sys.modules.get("triton.backends")
    backend = getattr(module, "backends", {}).get("cpu")
    return backend is not None and backend.driver is _InterpreterDriver
