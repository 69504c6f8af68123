# SPDX-License-Identifier: Apache-2.0
"""The gates of a GRU, after both matrix products: advance each state by one token.

A recurrent head reads the tokens of a path one by one. PyTorch multiplies the weights; this kernel
does the rest for all prefixes of a depth, and selects each prefix's old state by its parent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bastion_kernels.checks import FLOATS
from bastion_kernels.op import Op, public
from bastion_kernels.triton_or_none import tl, triton


@triton.jit
def _advance_kernel(
    inputs,
    gates,
    states,
    parents,
    out_states,
    stride_gates,
    G: tl.constexpr,
    OLD: tl.constexpr,
    NEW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (R * NEW, blocks of G)."""
    i_r, i_g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_g = i_g * BLOCK + tl.arange(0, BLOCK)
    m_g = o_g < G
    above = i_r // NEW * OLD + tl.load(parents + i_r)
    inputs += i_r * 3 * G + o_g
    gates += above * stride_gates + o_g
    b_old = tl.load(states + above * G + o_g, mask=m_g, other=0.0).to(tl.float32)
    b_reset = tl.load(inputs, mask=m_g, other=0.0).to(tl.float32)
    b_reset += tl.load(gates, mask=m_g, other=0.0).to(tl.float32)
    b_update = tl.load(inputs + G, mask=m_g, other=0.0).to(tl.float32)
    b_update += tl.load(gates + G, mask=m_g, other=0.0).to(tl.float32)
    b_new = tl.load(inputs + 2 * G, mask=m_g, other=0.0).to(tl.float32)
    b_hidden = tl.load(gates + 2 * G, mask=m_g, other=0.0).to(tl.float32)
    b_new += b_hidden / (1.0 + tl.exp(-b_reset))
    b_new = 2.0 / (1.0 + tl.exp(-2.0 * b_new)) - 1.0  # tanh
    b_weight = 1.0 / (1.0 + tl.exp(-b_update))
    b_state = (1.0 - b_weight) * b_new + b_weight * b_old
    tl.store(out_states + i_r * G + o_g, b_state.to(out_states.dtype.element_ty), mask=m_g)


@dataclass(slots=True)
class AdvanceStates(Op):
    """Advance GRU states (without biases) by the last token of each prefix, as `torch.nn.GRU`."""

    inputs: Tensor
    """`[R, P, 3G]`, product of the input weights with each prefix's last token."""
    gates: Tensor
    """`[R, O, >= 3G]`, product of the state weights with the O old states; further columns are
    ignored."""
    states: Tensor
    """`[R, O, G]`, the old states."""
    parents: Tensor
    """`[R, P]` int32, index of each prefix's old state."""
    out_states: Tensor
    """`[R, P, G]`, written."""

    def check(self) -> None:
        reqs, width, size = self.out_states.shape
        old, columns = self.gates.shape[1:]
        self.expect("inputs", (reqs, width, 3 * size), *FLOATS)
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
        reqs, width, size = self.out_states.shape
        if reqs == 0:
            return
        block = min(1024, triton.next_power_of_2(size))
        _advance_kernel[(reqs * width, triton.cdiv(size, block))](
            inputs=self.inputs,
            gates=self.gates,
            states=self.states,
            parents=self.parents,
            out_states=self.out_states,
            stride_gates=self.gates.shape[2],
            G=size,
            OLD=self.gates.shape[1],
            NEW=width,
            BLOCK=block,
        )


advance_states = public(AdvanceStates)
