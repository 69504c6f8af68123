# SPDX-License-Identifier: Apache-2.0
"""The states of all layers of a model, for ops that advance all of them in one launch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bastion_kernels.triton_or_none import tl, triton

_ELEMENTS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class LayerStates:
    """Addresses of the states of L layers with equal layouts.

    Args:
        states: `[B, ..]` of each layer, of one shape, dtype and device, and of the same strides.
        groups: row of `state_rows` for each layer.

    Raises:
        ValueError: no layer, or layers that differ.
    """

    def __init__(self, states: Sequence[Tensor], groups: Sequence[int]) -> None:
        layouts = {(tuple(x.shape), x.stride(), x.dtype, x.device) for x in states}
        if len(layouts) != 1 or len(states) != len(groups):
            raise ValueError(
                f"LayerStates: {len(states)} states of {len(layouts)} layouts and {len(groups)} "
                "groups"
            )
        self.states, self.groups = list(states), list(groups)
        self.first = self.states[0]
        addresses = [x.data_ptr() for x in states]
        self.table = torch.tensor(
            list(zip(addresses, groups, strict=True)), device=self.first.device
        )
        self._alignment = math.gcd(16, *addresses)

    def arguments(self, dims: str) -> dict[str, Any]:
        """Arguments of the kernels; dims: a letter for each dimension of a state."""
        return {
            "table": self.table,
            "ELEMENT": _ELEMENTS[self.first.dtype],
            "ALIGNMENT": self._alignment,
            **{f"stride_state_{d}": self.first.stride(i) for i, d in enumerate(dims)},
        }


@triton.jit
def path_length(p_path, tail, PATH: tl.constexpr, PATHS: tl.constexpr):
    """Entries of a request's path before the first that is outside the tail; others are stale."""
    o_path = tl.arange(0, PATHS)
    b_node = tl.load(p_path + o_path, mask=o_path < PATH, other=-1)
    return tl.min(tl.where((b_node >= 0) & (b_node < tail), PATHS, o_path), 0)
