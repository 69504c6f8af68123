# SPDX-License-Identifier: Apache-2.0
"""Wrappers that let Model Runner V2 run on a CPU host, where Triton has no back end."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from vllm_bastion.hooks.engine_args import runs_on_replacement
from vllm_bastion.platform import current_host


def init_device(original: Callable[..., Any], self: Any) -> None:
    """Install native kernels where they are needed.

    The worker's class has been imported by now, with the platform's own patches, and the model
    runner is not built yet: the only moment that suits both.
    """
    if runs_on_replacement(self.vllm_config):
        current_host().install_replacements()
    original(self)


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
