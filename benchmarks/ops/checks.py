# SPDX-License-Identifier: Apache-2.0
"""An op's result against its reference, as the ops' tests have it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from tests.references import OF

# The content of outputs before a run.
POISON = -7777


def check_op(op: Any, args: Sequence[Any], outs: Sequence[Tensor], *, device: str = "cpu") -> None:
    """Assert that an op leaves its arguments as its reference does: floats closely, others equal.

    Args:
        outs: those of the arguments that it writes in full.
        device: where the reference runs; most are loops of Python, which a host is better at.
    """
    for out in outs:
        out.fill_(POISON)
    theirs = tree_map(lambda x: x.to(device, copy=True) if isinstance(x, Tensor) else x, args)
    op(*args)
    OF[op.__name__](*theirs)
    for got, want in zip(tree_leaves(args), tree_leaves(theirs), strict=True):
        if isinstance(got, Tensor):
            torch.testing.assert_close(
                got.to(device), want, rtol=1e-5, atol=1e-5,
                msg=lambda text: f"{op.__name__} differs from its reference: {text}",
            )  # fmt: skip
