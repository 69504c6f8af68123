# SPDX-License-Identifier: Apache-2.0
"""The K best of several slices of the vocabulary, from the keys and masses of `topk_partial`.

A key is (logit as an order-preserving int32) << 32 | (2^31 - 1 - token). Larger is better and no
two keys are equal: the order is total, so any partition of the work gives the same tokens. A
slice's mass is log sum exp(logit - its largest logit).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from bastion_kernels.op import Op, padded, public
from bastion_kernels.triton_or_none import tl, triton

MAX_TOKEN = 2**31 - 1
NO_KEY = -(2**63)  # below every real key
_MAX_K = 1024  # one round each


@triton.jit
def unorder(b_order):
    """The inverse of `_order`."""
    return (b_order ^ ((b_order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def shift_of(largest):
    """The shift before exp; 0 if all logits are -inf, which gives log 0 instead of NaN."""
    return tl.where(largest > float("-inf"), largest, 0.0)


@triton.jit
def _merge_kernel(
    keys,
    mass,
    out_tokens,
    out_logprobs,
    P,
    stride_keys_m,
    stride_keys_p,
    stride_mass_m,
    stride_out_tokens_m,
    stride_out_logprobs_m,
    K: tl.constexpr,
    NO_KEY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (M,). The K best of keys [M, parts, K], sorted within each part."""
    i_r = tl.program_id(0).to(tl.int64)
    o_p = tl.arange(0, BLOCK)
    keys += i_r * stride_keys_m + o_p * stride_keys_p
    b_head = tl.zeros([BLOCK], tl.int32)
    b_key = tl.load(keys, mask=o_p < P, other=NO_KEY)

    largest = shift_of(unorder((tl.max(b_key, 0) >> 32).to(tl.int32)))
    b_mass = tl.load(mass + i_r * stride_mass_m + o_p, mask=o_p < P, other=float("-inf"))
    b_mass = tl.exp(unorder((b_key >> 32).to(tl.int32)) - largest + b_mass)
    total = tl.log(tl.sum(tl.where(o_p < P, b_mass, 0.0), 0))

    for rank in range(K):
        best = tl.max(b_key, 0)
        token = 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32)
        logprob = unorder((best >> 32).to(tl.int32)) - largest - total
        tl.store(out_tokens + i_r * stride_out_tokens_m + rank, token)
        tl.store(out_logprobs + i_r * stride_out_logprobs_m + rank, logprob)
        m_won = b_key == best
        b_head = tl.where(m_won, b_head + 1, b_head)
        m_left = m_won & (o_p < P) & (b_head < K)
        b_key = tl.where(m_won, tl.load(keys + b_head, mask=m_left, other=NO_KEY), b_key)


def check_k(op: str, k: int) -> None:
    """Raise unless the kernel can take `k` tokens, one in each round."""
    if not 1 <= k <= _MAX_K:
        raise ValueError(f"{op}: k must be in 1..{_MAX_K}, got {k}")


@dataclass(slots=True)
class MergeTopk(Op):
    """Merge the slices' keys into the K best tokens of the whole vocabulary."""

    # From `topk_partial` of P slices, with one K at least the number wanted.
    keys: Annotated[Tensor, "[M, P, K] int64"]
    mass: Annotated[Tensor, "[M, P] float32"]  # from `topk_partial`
    out_tokens: Annotated[Tensor, "[M, K] int32"]  # written: global token ids
    out_logprobs: Annotated[Tensor, "[M, K] float32"]  # written: over the whole vocabulary

    def check(self) -> None:
        Op.check(self)
        check_k(self.name, self.out_tokens.shape[1])

    def triton(self) -> None:
        rows, parts, _ = self.keys.shape
        block = padded(parts, 32)
        self.launch(_merge_kernel, rows, NO_KEY=NO_KEY, BLOCK=block, num_warps=1)


merge_topk = public(MergeTopk, cpu="bastion_kernels.cpu.topk")
