# SPDX-License-Identifier: Apache-2.0
"""What an earlier start compiled, loaded again by a later one on a CPU.

vLLM stores a compiled model and asks the stored function to finish loading, which only the
functions of its own compiler can. On a CPU PyTorch's compiles, whose functions are complete when
they are read, so every start failed there and compiled anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch


@contextmanager
def complete_when_read() -> Iterator[None]:
    """Within it, functions that `torch.compiler` loads need not know how to finish loading."""
    load = torch.compiler.load_compiled_function

    def load_complete(*args: Any, **kwargs: Any) -> Any:
        function: Any = load(*args, **kwargs)
        compiled = function._artifacts.compiled_fn
        if not hasattr(compiled, "finalize_loading"):
            compiled.finalize_loading = lambda vllm_config: None
        return function

    torch.compiler.load_compiled_function = load_complete
    try:
        yield
    finally:
        torch.compiler.load_compiled_function = load


@lru_cache
def host_instructions() -> str:
    """What a stored function may not be loaded without: a digest of the CPU's instructions."""
    # Here, so that the rest is there for processes that are not to import Numba.
    from bastion_kernels.cpu.native import HAVE_NUMBA

    if not HAVE_NUMBA:
        return ""
    from llvmlite.binding import get_host_cpu_features

    features = f"{get_host_cpu_features().flatten()} {torch.backends.cpu.get_cpu_capability()}"
    return hashlib.sha256(features.encode()).hexdigest()[:16]
