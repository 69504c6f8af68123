# SPDX-License-Identifier: Apache-2.0
"""The K best of several slices of the vocabulary, from the keys and masses of `topk_partial`.

A key is (logit as an order-preserving int32) << 32 | (2^31 - 1 - token), so that larger is better
and no two keys are equal: the order is total, and any grouping of the work gives the same tokens.
A slice's mass is log sum exp(logit - its largest logit).
"""

from __future__ import annotations

import torch
from torch import Tensor

from bastion_kernels.checks import check, on_gpu
from bastion_kernels.triton_or_none import tl, triton

__all__ = [
    "MAX_TOKEN",
    "NO_KEY",
    "check_k",
    "merge_topk",
    "merge_topk_reference",
    "merge_topk_triton",
    "shift_of",
    "unorder",
]

MAX_TOKEN = 2**31 - 1
NO_KEY = -(2**63)  # below every real key
_MAX_K = 1024  # one round each


def _value(keys: Tensor) -> Tensor:
    """The fp32 logit of every key."""
    ordered = (keys >> 32).int()
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(torch.float32)


def merge_topk_reference(
    keys: Tensor, mass: Tensor, out_tokens: Tensor, out_logprobs: Tensor
) -> None:
    """The best of several slices' keys, normalised; see `merge_topk`."""
    best = keys.flatten(1).topk(out_tokens.shape[1], dim=1).values
    largest = _value(best[:, :1])
    total = (_value(keys[:, :, 0]) - largest + mass).logsumexp(1, keepdim=True)
    out_tokens.copy_(MAX_TOKEN - (best & MAX_TOKEN))
    out_logprobs.copy_(_value(best) - largest - total)


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


def merge_topk_triton(keys: Tensor, mass: Tensor, out_tokens: Tensor, out_logprobs: Tensor) -> None:
    """One program per row; see `merge_topk`."""
    rows, parts, _ = keys.shape
    _merge_kernel[(rows,)](
        keys,
        mass,
        out_tokens,
        out_logprobs,
        parts,
        keys.stride(0),
        keys.stride(1),
        mass.stride(0),
        out_tokens.stride(0),
        out_logprobs.stride(0),
        K=out_tokens.shape[1],
        NO_KEY=NO_KEY,
        BLOCK=max(32, triton.next_power_of_2(parts)),
        num_warps=1,
    )


def check_k(op: str, k: int) -> None:
    if not 1 <= k <= _MAX_K:
        raise ValueError(f"{op}: k must be in 1..{_MAX_K}, got {k}")


def merge_topk(keys: Tensor, mass: Tensor, out_tokens: Tensor, out_logprobs: Tensor) -> None:
    """Merge the slices' keys into the K best tokens of the whole vocabulary.

    Args:
        keys: `[M, P, K]` int64, from `topk_partial` of P slices, with one K at least the number
            wanted.
        mass: `[M, P]` fp32, theirs.
        out_tokens: `[M, K]` int32, global token ids, written.
        out_logprobs: `[M, K]` fp32, over the whole vocabulary, written.

    Raises:
        ValueError, TypeError: shapes or dtypes do not fit together.
    """
    op, (rows, parts, _), k = "merge_topk", keys.shape, out_tokens.shape[1]
    check(op, "keys", keys, (rows, parts, k), torch.int64)
    check(op, "mass", mass, (rows, parts), torch.float32)
    check(op, "out_tokens", out_tokens, (rows, k), torch.int32)
    check(op, "out_logprobs", out_logprobs, (rows, k), torch.float32)
    check_k(op, k)
    run = merge_topk_triton if on_gpu(keys) else merge_topk_reference
    run(keys, mass, out_tokens, out_logprobs)
