# SPDX-License-Identifier: Apache-2.0
"""The K best of several slices of the vocabulary, from the keys and masses of `topk_partial`.

A key is (logit as an order-preserving int32) << 32 | (2^31 - 1 - token), so that larger is better
and no two keys are equal: the order is total, and any grouping of the work gives the same tokens.
A slice's mass is log sum exp(logit - its largest logit).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bastion_kernels.op import Op, public
from bastion_kernels.triton_or_none import tl, triton

MAX_TOKEN = 2**31 - 1
NO_KEY = -(2**63)  # below every real key
_MAX_K = 1024  # one round each


def _value(keys: Tensor) -> Tensor:
    """The fp32 logit of every key."""
    ordered = (keys >> 32).int()
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(torch.float32)


@triton.jit
def unorder(order):
    """The fp32 value that `_order` made this int32 of."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def shift_of(largest):
    """What to subtract before exp; 0 where there is nothing but -inf, for log 0 and not NaN."""
    return tl.where(largest > float("-inf"), largest, 0.0)


@triton.jit
def _merge_kernel(
    keys_ptr,
    mass_ptr,
    out_tokens_ptr,
    out_logprobs_ptr,
    parts,
    keys_m,
    keys_p,
    mass_m,
    out_tokens_m,
    out_logprobs_m,
    K: tl.constexpr,
    NO_KEY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (M,). Of keys [M, parts, K], each part's sorted, the K best; parts side by side."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK)
    keys_ptr += row * keys_m + part * keys_p
    head = tl.zeros([BLOCK], tl.int32)
    key = tl.load(keys_ptr, mask=part < parts, other=NO_KEY)

    largest = shift_of(unorder((tl.max(key, 0) >> 32).to(tl.int32)))
    mass = tl.load(mass_ptr + row * mass_m + part, mask=part < parts, other=float("-inf"))
    mass = tl.exp(unorder((key >> 32).to(tl.int32)) - largest + mass)
    total = tl.log(tl.sum(tl.where(part < parts, mass, 0.0), 0))

    for rank in range(K):
        best = tl.max(key, 0)
        token = 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32)
        logprob = unorder((best >> 32).to(tl.int32)) - largest - total
        tl.store(out_tokens_ptr + row * out_tokens_m + rank, token)
        tl.store(out_logprobs_ptr + row * out_logprobs_m + rank, logprob)
        won = key == best
        head = tl.where(won, head + 1, head)
        left = won & (part < parts) & (head < K)
        key = tl.where(won, tl.load(keys_ptr + head, mask=left, other=NO_KEY), key)


def check_k(op: str, k: int) -> None:
    """Raise unless `k` tokens can be taken, one in each round of the kernel."""
    if not 1 <= k <= _MAX_K:
        raise ValueError(f"{op}: k must be in 1..{_MAX_K}, got {k}")


@dataclass(slots=True)
class MergeTopk(Op):
    """Merge the slices' keys into the K best tokens of the whole vocabulary.

    Raises:
        ValueError, TypeError: shapes or dtypes do not fit together.
    """

    keys: Tensor
    """`[M, P, K]` int64, from `topk_partial` of P slices, with one K at least the number wanted."""
    mass: Tensor
    """`[M, P]` fp32, theirs."""
    out_tokens: Tensor
    """`[M, K]` int32, global token ids, written."""
    out_logprobs: Tensor
    """`[M, K]` fp32, over the whole vocabulary, written."""

    def check(self) -> None:
        (rows, parts, _), k = self.keys.shape, self.out_tokens.shape[1]
        self.expect("keys", (rows, parts, k), torch.int64)
        self.expect("mass", (rows, parts), torch.float32)
        self.expect("out_tokens", (rows, k), torch.int32)
        self.expect("out_logprobs", (rows, k), torch.float32)
        check_k(self.name, k)

    def reference(self) -> None:
        """The best of several slices' keys, normalised."""
        best = self.keys.flatten(1).topk(self.out_tokens.shape[1], dim=1).values
        largest = _value(best[:, :1])
        total = (_value(self.keys[:, :, 0]) - largest + self.mass).logsumexp(1, keepdim=True)
        self.out_tokens.copy_(MAX_TOKEN - (best & MAX_TOKEN))
        self.out_logprobs.copy_(_value(best) - largest - total)

    def triton(self) -> None:
        """One program per row."""
        rows, parts, _ = self.keys.shape
        _merge_kernel[(rows,)](
            self.keys,
            self.mass,
            self.out_tokens,
            self.out_logprobs,
            parts,
            self.keys.stride(0),
            self.keys.stride(1),
            self.mass.stride(0),
            self.out_tokens.stride(0),
            self.out_logprobs.stride(0),
            K=self.out_tokens.shape[1],
            NO_KEY=NO_KEY,
            BLOCK=max(32, triton.next_power_of_2(parts)),
            num_warps=1,
        )


merge_topk = public(MergeTopk)
