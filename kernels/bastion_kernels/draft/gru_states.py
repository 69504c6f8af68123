# SPDX-License-Identifier: Apache-2.0
"""Advance the states of a GRU by one token each: its gates, after both products.

A head with a state along the branch reads the tokens of a path one by one. PyTorch multiplies the
weights; what is left is one launch over all prefixes of a depth, which also picks each prefix's
state by its parent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bastion_kernels.op import Op, public
from bastion_kernels.triton_or_none import tl, triton

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def _advance_kernel(
    inputs_ptr,
    gates_ptr,
    states_ptr,
    parents_ptr,
    out_ptr,
    gates_row,
    G: tl.constexpr,
    OLD: tl.constexpr,
    NEW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (R * NEW, blocks of G)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = column < G
    above = row // NEW * OLD + tl.load(parents_ptr + row)
    inputs_ptr += row * 3 * G + column
    gates_ptr += above * gates_row + column
    old = tl.load(states_ptr + above * G + column, mask=real, other=0.0).to(tl.float32)
    reset = tl.load(inputs_ptr, mask=real, other=0.0).to(tl.float32)
    reset += tl.load(gates_ptr, mask=real, other=0.0).to(tl.float32)
    update = tl.load(inputs_ptr + G, mask=real, other=0.0).to(tl.float32)
    update += tl.load(gates_ptr + G, mask=real, other=0.0).to(tl.float32)
    new = tl.load(inputs_ptr + 2 * G, mask=real, other=0.0).to(tl.float32)
    hidden = tl.load(gates_ptr + 2 * G, mask=real, other=0.0).to(tl.float32)
    new += hidden / (1.0 + tl.exp(-reset))
    new = 2.0 / (1.0 + tl.exp(-2.0 * new)) - 1.0  # tanh
    weight = 1.0 / (1.0 + tl.exp(-update))
    state = (1.0 - weight) * new + weight * old
    tl.store(out_ptr + row * G + column, state.to(out_ptr.dtype.element_ty), mask=real)


@dataclass(slots=True)
class AdvanceStates(Op):
    """Advance GRU states (without biases) by the last token of each prefix, as `torch.nn.GRU`.

    Raises:
        ValueError, TypeError: shapes, strides or dtypes do not fit together.
    """

    inputs: Tensor
    """`[R, P, 3G]`, the input weights' product with each prefix's last token."""
    gates: Tensor
    """`[R, O, 3G or more]`, the state weights' product with the O old states; further columns are
    not read."""
    states: Tensor
    """`[R, O, G]`, the old states."""
    parents: Tensor
    """`[R, P]` int32, the old state that each prefix continues."""
    out_states: Tensor
    """`[R, P, G]`, written."""

    def check(self) -> None:
        reqs, width, size = self.out_states.shape
        old, columns = self.gates.shape[1:]
        self.expect("inputs", (reqs, width, 3 * size), *_FLOATS)
        self.expect("gates", (reqs, old, columns), self.inputs.dtype)
        self.expect("states", (reqs, old, size), self.inputs.dtype)
        self.expect("parents", (reqs, width), torch.int32)
        self.expect("out_states", (reqs, width, size), self.inputs.dtype)
        for name in ("inputs", "gates", "states", "parents", "out_states"):
            if not getattr(self, name).is_contiguous():
                raise ValueError(f"{self.name}: {name} must be contiguous")
        if columns < 3 * size:
            raise ValueError(f"{self.name}: gates must have 3G = {3 * size} columns, got {columns}")

    def reference(self) -> None:
        """Gate by gate in fp32."""
        size = self.out_states.shape[2]
        parents = self.parents.long()[..., None]
        gates = self.gates[..., : 3 * size].gather(1, parents.expand(-1, -1, 3 * size)).float()
        old = self.states.gather(1, parents.expand(-1, -1, size)).float()
        reset_in, update_in, new_in = self.inputs.float().chunk(3, dim=-1)
        reset, update, new = gates.chunk(3, dim=-1)
        new = torch.tanh(new_in + torch.sigmoid(reset_in + reset) * new)
        update = torch.sigmoid(update_in + update)
        self.out_states.copy_((1 - update) * new + update * old)

    def triton(self) -> None:
        """One launch."""
        reqs, width, size = self.out_states.shape
        if reqs == 0:
            return
        block = min(1024, triton.next_power_of_2(size))
        _advance_kernel[(reqs * width, triton.cdiv(size, block))](
            self.inputs,
            self.gates,
            self.states,
            self.parents,
            self.out_states,
            self.gates.shape[2],
            G=size,
            OLD=self.gates.shape[1],
            NEW=width,
            BLOCK=block,
        )


advance_states = public(AdvanceStates)
