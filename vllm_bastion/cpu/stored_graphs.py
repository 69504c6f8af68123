# SPDX-License-Identifier: Apache-2.0
"""Loads models that an earlier start compiled, on a CPU.

After loading a compiled function vLLM calls its `finalize_loading`. Only functions of vLLM's own
compiler have that method. On a CPU PyTorch compiles, whose functions need no finishing, so without
this module every start fails to load them and compiles again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def complete_when_read() -> Iterator[None]:
    """Within it, functions that `torch.compiler` loads get a `finalize_loading` if they lack it."""
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
