# SPDX-License-Identifier: Apache-2.0
"""What a CPU host without Triton, or without numba, still has."""

from __future__ import annotations

import pytest

from helpers import run_python

_HIDE = "import sys; sys.modules.update(dict.fromkeys({modules!r}))\n"
# A launcher on CPU tensors, and a kernel asked for by name.
_USE = """
import torch
import bastion_kernels as k
from bastion_kernels.accept.gather import gather_rows_triton
source, out = torch.arange(12.0).view(4, 3), torch.zeros(2, 3)
k.gather_rows([source], torch.tensor([2, 1]), [out])
assert torch.equal(out, source[[2, 1]])
parents, bits = torch.tensor([[0, 1]], dtype=torch.int32), torch.zeros(1, 3, 1, dtype=torch.int32)
k.ancestor_bits(parents, torch.zeros(1, dtype=torch.int64), bits)
assert bits.flatten().tolist() == [1, 3, 7]
print("used", flush=True)
"""
_LAUNCH = "gather_rows_triton([source], torch.tensor([2, 1]), [out])"


@pytest.mark.parametrize("modules", [("triton",), ("numba",), ("triton", "numba")])
def test_the_package_imports_and_runs_on_the_cpu(modules: tuple[str, ...]) -> None:
    """And says what is missing where a Triton kernel is asked for by name."""
    hidden = "triton" in modules
    done = run_python(_HIDE.format(modules=modules) + _USE + (_LAUNCH if hidden else ""))
    assert done.stdout == "used\n", done.stderr
    if hidden:
        assert done.returncode != 0
        assert "needs Triton, which is not installed" in done.stderr
