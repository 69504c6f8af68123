# SPDX-License-Identifier: Apache-2.0
"""Every tensor allocated unfilled holds NaN or the largest integer, as it may in service."""

from __future__ import annotations

from typing import Any

import torch


def poison() -> None:
    """For the rest of this process; on a CPU, compiled code of TorchInductor included."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    # Compiled as ever, so that what others have compiled is loaded.
    torch._inductor.config.deterministic = False
    # Compiled code takes its buffers from here, past PyTorch's allocating ops.
    guards: Any = torch._C._dynamo.guards
    allocate = guards._empty_strided_cpu

    def poisoned(*args: Any) -> torch.Tensor:
        out = allocate(*args)
        return out.fill_(float("nan")) if out.is_floating_point() else out

    guards._empty_strided_cpu = poisoned
