# SPDX-License-Identifier: Apache-2.0
"""The worker of method "bastion" on a CPU. Importing vLLM's CPU worker patches PyTorch."""

from __future__ import annotations

# The patches must come before the GPU worker, which ours imports.
from vllm.v1.worker.cpu_worker import CPUWorker  # isort: skip
from vllm_bastion.hooks.worker import BastionWorker


class BastionCPUWorker(BastionWorker, CPUWorker):
    """vLLM's CPU worker with the same changes."""
