# SPDX-License-Identifier: Apache-2.0
"""The hook in the worker process: where the runner adapters and what a CPU host needs come in.

It runs when the worker class has been imported (with the platform's own patches) and before the
model runner is built, which is the only moment that suits both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_bastion.config import bastion_config
from vllm_bastion.cpu import interpreter
from vllm_bastion.hooks.engine_args import runs_on_twins
from vllm_bastion.hooks.wrap import wrap


def _apply_top_k_top_p(
    original: Callable[..., Any], logits: Any, k: Any, p: Any, *args: Any, **kwargs: Any
) -> Any:
    """vLLM's PyTorch version: the interpreter cannot run the Triton kernel."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    if not interpreter.active():
        return original(logits, k, p, *args, **kwargs)
    return apply_top_k_top_p_pytorch(logits, k, p, allow_cpu_sync=True)


def init_device(original: Callable[..., Any], self: Any) -> None:
    """Install native kernels where they are needed, and the adapters of method "bastion"."""
    if interpreter.active():
        # For every method: plain decoding in the interpreter needs it as well.
        wrap(
            "vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_top_p_triton",
            _apply_top_k_top_p,
            expects=(
                "(logits, k, p, mask_value=)",
                "(logits, k, p, mask_value=, has_topp_only_rows=)",
            ),
        )
    if runs_on_twins(self.vllm_config):
        from vllm_bastion.cpu import twins

        twins.install()
    if bastion_config(self.vllm_config) is not None:
        from vllm_bastion import engine as runner

        runner.install(self.vllm_config)
    original(self)
