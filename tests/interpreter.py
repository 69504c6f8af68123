# SPDX-License-Identifier: Apache-2.0
"""Run vLLM's own Triton kernels, and ours, in Triton's interpreter on a host without a GPU.

vLLM's CPU build uses Triton only if `triton.backends` has an entry `cpu`. An entry with an inactive
driver is enough for vLLM, and Triton ignores it when it chooses a driver. TRITON_INTERPRET makes
every kernel run as Python, which is exact and slow.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from importlib import metadata
from typing import Any

from vllm_bastion.cpu.build import is_cpu_build


class _InterpreterDriver:
    """Stands for the driver of a Triton back end; never active."""

    @staticmethod
    def is_active() -> bool:
        return False


def has_cpu_backend() -> bool:
    """Whether an installed distribution brings a real CPU back end for Triton."""
    return any(ep.name == "cpu" for ep in metadata.entry_points(group="triton.backends"))


def enable() -> None:
    """Switch the interpreter on in this process, before vLLM looks for Triton, if one is needed."""
    if not is_cpu_build() or has_cpu_backend():
        return
    # A kernel is bound to the compiler or the interpreter when it is decorated.
    os.environ["TRITON_INTERPRET"] = "1"
    _interpret_triton_library()
    keep_masks_boolean()
    save_time()
    from triton.backends import Backend, backends

    compiler: Any = None
    driver: Any = _InterpreterDriver
    backends.setdefault("cpu", Backend(compiler, driver))


def sample_without_triton() -> None:
    """Let vLLM apply top-k and top-p in PyTorch: the interpreter cannot run that kernel."""
    from vllm.v1.sample.ops import topk_topp_sampler as module

    def in_pytorch(logits: Any, k: Any, p: Any, **of_the_kernel: Any) -> Any:
        return module.apply_top_k_top_p_pytorch(logits, k, p, allow_cpu_sync=True)

    module.apply_top_k_top_p_triton = in_pytorch


def _interpret_triton_library() -> None:
    """Decorate Triton's own functions (tl.sum, tl.max, ...) again if they were imported earlier.

    They are bound to the compiler then, and an interpreted kernel cannot call them.
    """
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    interpreted: dict[int, Any] = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "triton":
            continue
        for attribute, value in list(vars(module).items()):
            if type(value) is JITFunction:
                # One object for all the names that it is exported under.
                if id(value) not in interpreted:
                    interpreted[id(value)] = InterpretedFunction(value.fn)
                setattr(module, attribute, interpreted[id(value)])


def keep_masks_boolean() -> None:
    """Let a scalar comparison be a mask, as in vLLM's grammar kernel.

    Triton 3.9's interpreter gives the result of a comparison the type of its operands, so a scalar
    truth value is spread as integers, which its store refuses.
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


def save_time() -> None:
    """Leave out what the interpreter computes in vain, or anew for each call."""
    import triton.language as tl
    from triton.runtime import interpreter as own

    # Triton checks every sum for an overflow, and forgets what it found unless it debugs.
    if not own.interpreter_builder.options.debug:
        own.interpreter_builder.options = own.InterpreterOptions(sanitize_overflow=False)
    find, types, blocks, builtins = own._get_np_dtype, {}, {}, {}

    def numpy_type(kind: Any) -> Any:
        return types.get(kind.name) or types.setdefault(kind.name, find(kind))

    def block_type(kind: Any, shape: Any) -> Any:
        key = kind.name, *shape
        if key not in blocks:
            blocks[key] = tl.block_type(kind, shape)
        return blocks[key]

    def patch_builtins(place: Any, builder: Any, scope: Any) -> None:
        if not builtins.get(place):
            builtins[place] = inspect.getmembers(place, tl.core.is_builtin)
        for name, member in builtins[place]:
            if getattr(place, name) is not member:
                return  # a caller has patched all of them
            own._patch_attr(place, name, member, builder, scope)

    own._get_np_dtype, own._patch_builtin = numpy_type, patch_builtins
    own.InterpreterBuilder.get_block_ty = lambda _, *given: block_type(*given)
    tl.block_type.with_element_ty = lambda self, kind: block_type(kind, self.shape)
