# SPDX-License-Identifier: Apache-2.0
"""Fill every uninitialised tensor with NaN or the largest integer, to detect reads of it."""

from __future__ import annotations

from typing import Any

import torch


def poison() -> None:
    """Do this for the rest of the process; on a CPU also in TorchInductor's compiled code."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    # Compile as usual, so that cached code can be loaded.
    torch._inductor.config.deterministic = False
    # Compiled code allocates its buffers here, and not with PyTorch's ops.
    guards: Any = torch._C._dynamo.guards
    allocate = guards._empty_strided_cpu

    def poisoned(*args: Any) -> torch.Tensor:
        out = allocate(*args)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    guards._empty_strided_cpu = poisoned
