# SPDX-License-Identifier: Apache-2.0
"""The adapters between bastion and vLLM's Model Runner V2.

`install` runs in each worker process that is asked for bastion, after the platform's own patches
and before the runner is built.
"""

from typing import Any


def install(vllm_config: Any) -> None:
    """Wrap the names listed in `vllm_bastion.hooks.runner`. Does nothing the second time.

    Raises:
        HookError: a name of vLLM is missing or has changed.
    """
    from vllm_bastion.hooks import wrap
    from vllm_bastion.hooks.gated_delta import GATED_DELTA_HOOKS
    from vllm_bastion.hooks.runner import RUNNER_HOOKS

    hybrid = GATED_DELTA_HOOKS if vllm_config.model_config.is_hybrid else ()
    for hook in (*RUNNER_HOOKS, *hybrid):
        if hook.target.startswith("vllm.v1.worker.cpu_worker") and not _is_cpu():
            continue  # importing the CPU worker patches torch
        wrap(hook.target, hook.function(), expects=hook.expects)


def _is_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())
