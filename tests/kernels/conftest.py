# SPDX-License-Identifier: Apache-2.0
"""Two lanes for the Triton code: compiled where there is a CUDA device, interpreted elsewhere.

`triton.jit` reads TRITON_INTERPRET when a kernel is defined; `tests/conftest.py` sets it before
anything imports `bastion_kernels`.
"""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the Triton code runs in these tests."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
