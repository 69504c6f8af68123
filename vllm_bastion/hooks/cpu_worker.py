# SPDX-License-Identifier: Apache-2.0
"""Workers on a CPU host. Importing vLLM's CPU worker patches PyTorch."""

from __future__ import annotations

from typing import Any

# The patches must come before the GPU worker, which ours imports.
from vllm.v1.worker.cpu_worker import CPUWorker  # isort: skip
from vllm.v1.worker import gpu_worker

from vllm_bastion.hooks.engine_args import runs_on_replacement
from vllm_bastion.hooks.worker import BastionWorker
from vllm_bastion.versions import capabilities


class ReplacementWorker(CPUWorker):
    """vLLM's CPU worker, with Model Runner V2 on our CPU replacements where they are needed."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        self._on_replacement = runs_on_replacement(vllm_config)
        if not (self._on_replacement and capabilities().worker_requires_triton):
            super().__init__(vllm_config, *args, **kwargs)
            return
        # Read by this constructor only, which refuses V2 without Triton.
        found, gpu_worker.HAS_TRITON = gpu_worker.HAS_TRITON, True
        try:
            super().__init__(vllm_config, *args, **kwargs)
        finally:
            gpu_worker.HAS_TRITON = found

    def init_device(self) -> None:
        """Install native kernels before the model runner is built."""
        if self._on_replacement:
            from vllm_bastion.cpu import replacements  # needs Numba

            replacements.install()
        super().init_device()


class BastionCPUWorker(BastionWorker, ReplacementWorker):
    """Our worker on a CPU."""
