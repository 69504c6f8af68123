# SPDX-License-Identifier: Apache-2.0
"""The hook in the worker process: where the runner adapters and what a CPU host needs come in.

It runs after the worker class was imported (with the platform's own patches) and before the model
runner is built, the only moment that suits both.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from vllm_bastion.config import bastion_config
from vllm_bastion.hooks.engine_args import runs_on_twins
from vllm_bastion.platform import current_host

_CPU_WORKER = "vllm.v1.worker.cpu_worker"


def init_device(original: Callable[..., Any], self: Any) -> None:
    """Install native kernels where they are needed, and the adapters of method "bastion"."""
    if runs_on_twins(self.vllm_config):
        current_host().install_twins()
    if bastion_config(self.vllm_config) is not None:
        install_adapters(self.vllm_config)
    original(self)


def install_adapters(vllm_config: Any) -> None:
    """Install the hooks inside the model runner; a second call does nothing.

    Raises:
        HookError: a symbol of vLLM is missing or has changed.
    """
    from vllm_bastion.hooks.gated_delta import GATED_DELTA_HOOKS
    from vllm_bastion.hooks.runner import RUNNER_HOOKS
    from vllm_bastion.hooks.warm_up import WARM_UP_HOOKS

    for hook in (*RUNNER_HOOKS, *WARM_UP_HOOKS, *GATED_DELTA_HOOKS):
        if hook in GATED_DELTA_HOOKS and not vllm_config.model_config.is_hybrid:
            continue
        if hook.target.partition(":")[0] == _CPU_WORKER and _CPU_WORKER not in sys.modules:
            continue  # importing the CPU worker patches torch
        hook.install()


def execute_dummy_batch(original: Callable[..., None], self: Any) -> None:
    """Join the step of a rank that has work, with one row in place of N + 1."""
    if bastion_config(self.vllm_config) is None:
        original(self)
    else:
        self.model_runner._dummy_run(1, randomize_inputs=self.randomize_dummy_inputs)


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
