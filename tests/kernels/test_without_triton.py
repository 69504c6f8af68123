# SPDX-License-Identifier: Apache-2.0
"""A CPU host needs no Triton; `test_host.py` has what a GPU host does not need."""

from __future__ import annotations

from helpers import run_python

_HIDE = "import sys; sys.modules.update(dict.fromkeys({modules!r}))\n"
_USE = """
import torch
import bastion_kernels as k
source, out = torch.arange(12.0).view(4, 3), torch.zeros(2, 3)
k.gather_rows([source], torch.tensor([2, 1]), [out])
assert torch.equal(out, source[[2, 1]])
parents, bits = torch.tensor([[0, 1]], dtype=torch.int32), torch.zeros(1, 3, 1, dtype=torch.int32)
k.ancestor_bits(parents, torch.zeros(1, dtype=torch.int64), bits)
assert bits.flatten().tolist() == [1, 3, 7]
print("used", flush=True)
"""
_LAUNCH = "k.gather_rows.triton([source], torch.tensor([2, 1]), [out])"


def test_a_cpu_host_needs_no_triton() -> None:
    """Launching a Triton kernel says what is missing."""
    done = run_python(_HIDE.format(modules=("triton",)) + _USE + _LAUNCH)
    assert done.stdout == "used\n", done.stderr
    assert done.returncode != 0
    assert "needs Triton, which is not installed" in done.stderr
