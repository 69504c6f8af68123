# SPDX-License-Identifier: Apache-2.0
"""Two lanes for the Triton code: compiled where there is a CUDA device, interpreted elsewhere.

`triton.jit` reads TRITON_INTERPRET when a kernel is defined; `tests/conftest.py` sets it before
anything imports `bastion_kernels`.
"""

from __future__ import annotations

import numpy as np
import pytest
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


@pytest.fixture(autouse=True)
def bfloat16_products_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter keeps bfloat16 as uint16 and would multiply the bit patterns."""

    def widen(x: TensorHandle) -> TensorHandle:
        if x.dtype != tl.bfloat16:
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    original = InterpreterBuilder.create_dot
    monkeypatch.setattr(
        InterpreterBuilder,
        "create_dot",
        lambda self, a, b, *rest: original(self, widen(a), widen(b), *rest),
    )
