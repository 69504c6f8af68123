# SPDX-License-Identifier: Apache-2.0
"""The states of all layers of a model, for ops that move all of them in one launch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from bastion_kernels.triton_or_none import tl

__all__ = ["LayerStates", "accepted_rows"]

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

    def arguments(self) -> dict[str, Any]:
        """Compile-time arguments of the kernels."""
        return {"ELEMENT": _ELEMENTS[self.first.dtype], "ALIGNMENT": self._alignment}


def accepted_rows(
    states: LayerStates,
    state_rows: Tensor,
    into_rows: Tensor,
    query_start_loc: Tensor,
    cu_num_logits: Tensor,
    path: Tensor,
) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """For every layer and request: layer number, state read, state written, accepted rows.

    Accepted rows are those before the root, the root and the nodes of the path.
    """
    starts, logits = query_start_loc.tolist(), cu_num_logits.tolist()
    rows: list[Tensor] = []
    for r, (first, last) in enumerate(pairwise(starts)):
        tail = logits[r + 1] - logits[r]
        live = ((path[r] >= 0) & (path[r] < tail)).long().cumprod(0).bool()
        # a request without a state may have a tail but no rows
        root = max(first, last - tail)
        before = torch.arange(first, root if live.any() else first, device=path.device)
        rows.append(torch.cat([before, root + path[r][live].long()]))
    from_rows, to_rows = state_rows.tolist(), into_rows.tolist()
    for layer, (state, group) in enumerate(zip(states.states, states.groups, strict=True)):
        for own, into, accepted in zip(from_rows[group], to_rows[group], rows, strict=False):
            if own >= 0 and into >= 0 and len(accepted):
                yield layer, state[own], state[into], accepted
