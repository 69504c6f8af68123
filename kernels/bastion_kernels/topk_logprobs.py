# SPDX-License-Identifier: Apache-2.0
"""The K likeliest tokens of every drafted position, with their log-probabilities.

    out_logprobs[m, i] = logits[m, out_tokens[m, i]] - log sum_v exp(logits[m, v])

sorted by logit, descending; equal logits in order of token id. Under tensor parallelism each rank
holds a slice of the vocabulary: `topk_partial` gives its K best as sortable 64-bit keys and its
mass, log sum exp(logit - largest logit of the slice); the ranks exchange these (M * (8 K + 4)
bytes), and `merge_topk` gives what one rank with the whole vocabulary would have.

A key is (logit as an order-preserving int32) << 32 | (2^31 - 1 - token), so that larger is better
and no two keys are equal: the order is total, and any grouping of the work gives the same tokens.

Two launches, one warp per program, no sort. `_chunk_kernel` reads the logits once, in chunks of
2,048, so that the 15 rows of one request make 1,125 programs at V = 151,936. Seen as 128 groups of
16 logits, a chunk's best is the best of the groups' maxima; K times it is taken, and only its group
is read again (from L1) for the next smaller one. Groups are strided, so that their maxima need no
exchange between threads. `_merge_kernel` does the same with the sorted lists of a row's chunks, by
their heads. A round is a few reductions within the warp and one load. Memory traffic is that of the
logits: M * V * itemsize bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from bastion_kernels.checks import check, on_gpu

__all__ = [
    "merge_topk",
    "merge_topk_reference",
    "merge_topk_triton",
    "topk_logprobs",
    "topk_logprobs_reference",
    "topk_logprobs_triton",
    "topk_partial",
    "topk_partial_reference",
    "topk_partial_triton",
]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_MAX_TOKEN = 2**31 - 1
_NO_KEY = -(2**63)  # below every real key
_GROUPS, _GROUP_SIZE = 128, 16  # of one chunk
_MAX_K = 1024  # one round each


def topk_partial_reference(
    logits: Tensor, k: int, vocab_start: int, out_keys: Tensor, out_mass: Tensor
) -> None:
    """Keys of the `k` best of one vocabulary slice; see `topk_partial`."""
    values = logits.float() + 0.0  # -0.0 becomes 0.0: equal logits must have equal keys
    bits = values.view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    token = torch.arange(vocab_start, vocab_start + logits.shape[1], device=logits.device)
    best = ((ordered << 32) | (_MAX_TOKEN - token)).topk(min(k, logits.shape[1]), dim=1).values
    out_keys.fill_(_NO_KEY)
    out_keys[:, : best.shape[1]] = best
    largest = values.amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
    out_mass.copy_((values - largest).logsumexp(1))


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
    out_tokens.copy_(_MAX_TOKEN - (best & _MAX_TOKEN))
    out_logprobs.copy_(_value(best) - largest - total)


def topk_logprobs_reference(
    logits: Tensor, k: int, out_tokens: Tensor, out_logprobs: Tensor
) -> None:
    """One slice that is the whole vocabulary; see `topk_logprobs`."""
    keys = torch.empty((logits.shape[0], 1, k), dtype=torch.int64, device=logits.device)
    mass = torch.empty((logits.shape[0], 1), dtype=torch.float32, device=logits.device)
    topk_partial_reference(logits, k, 0, keys[:, 0], mass[:, 0])
    merge_topk_reference(keys, mass, out_tokens, out_logprobs)


@triton.jit
def _order(value, inside):
    """int32 that sorts like the fp32 `value`; below all of them where not `inside`."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    order = tl.maximum(bits ^ ((bits >> 31) & 0x7FFFFFFF), -0x7FFFFFFF)
    return tl.where(inside, order, -0x80000000)


@triton.jit
def _unorder(order):
    """The fp32 value that `_order` made this int32 of."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _chunk_kernel(
    logits_ptr,
    keys_ptr,
    mass_ptr,
    vocab,
    vocab_start,
    chunks,
    logits_m,
    logits_v,
    K: tl.constexpr,
    NO_KEY: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Grid: (M, chunks). Writes keys [M, chunks, K], best first, and mass [M, chunks]."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits_ptr += row * logits_m
    keys_ptr += (row * chunks + chunk) * K
    group, member = tl.arange(0, GROUPS), tl.arange(0, SIZE)
    start = chunk * (GROUPS * SIZE)
    token = start + member[:, None] * GROUPS + group[None, :]
    inside = token < vocab
    offset = token.to(tl.int64) * logits_v
    value = tl.load(logits_ptr + offset, mask=inside, other=float("-inf")).to(tl.float32)

    top = tl.max(tl.max(value, 0), 0)
    top = tl.where(top == float("-inf"), 0.0, top)  # nothing but -inf: log 0, not NaN
    total = tl.sum(tl.sum(tl.exp(value - top), 0), 0)
    tl.store(mass_ptr + row * chunks + chunk, tl.log(total))

    order = _order(value, inside)
    group_order = tl.max(order, 0)
    group_token = tl.min(tl.where(order == group_order[None, :], token, 0x7FFFFFFF), 0)
    for rank in range(K):
        best = tl.max(group_order, 0)
        winner = tl.min(tl.where(group_order == best, group_token, 0x7FFFFFFF), 0)
        real = best != -0x80000000
        key = (best.to(tl.int64) << 32) | (0x7FFFFFFF - winner - vocab_start).to(tl.int64)
        tl.store(keys_ptr + rank, tl.where(real, key, NO_KEY))
        # the winner's group falls back to its best member after the winner
        index = (winner - start) % GROUPS
        rest = start + member * GROUPS + index
        left = rest < vocab
        again_ptr = logits_ptr + rest.to(tl.int64) * logits_v
        again = tl.load(again_ptr, mask=left, other=float("-inf")).to(tl.float32)
        rest_order = _order(again, left)
        after = (rest_order < best) | ((rest_order == best) & (rest > winner))
        rest_order = tl.where(after, rest_order, -0x80000000)
        next_order = tl.max(rest_order, 0)
        next_token = tl.min(tl.where(rest_order == next_order, rest, 0x7FFFFFFF), 0)
        group_order = tl.where(group == index, next_order, group_order)
        group_token = tl.where(group == index, next_token, group_token)


@triton.jit
def _merge_kernel(
    keys_ptr,
    mass_ptr,
    out_keys_ptr,
    out_mass_ptr,
    out_tokens_ptr,
    out_logprobs_ptr,
    parts,
    keys_m,
    keys_p,
    mass_m,
    out_keys_m,
    out_tokens_m,
    out_logprobs_m,
    K: tl.constexpr,
    NO_KEY: tl.constexpr,
    FINAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (M,). keys [M, parts, K] to the K best: keys and mass again, or if FINAL the result."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK)
    keys_ptr += row * keys_m + part * keys_p
    head = tl.zeros([BLOCK], tl.int32)
    key = tl.load(keys_ptr, mask=part < parts, other=NO_KEY)

    largest = _unorder((tl.max(key, 0) >> 32).to(tl.int32))
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    mass = tl.load(mass_ptr + row * mass_m + part, mask=part < parts, other=float("-inf"))
    mass = tl.exp(_unorder((key >> 32).to(tl.int32)) - largest + mass)
    total = tl.log(tl.sum(tl.where(part < parts, mass, 0.0), 0))
    if not FINAL:
        tl.store(out_mass_ptr + row, total)

    for rank in range(K):
        best = tl.max(key, 0)
        if FINAL:
            value = _unorder((best >> 32).to(tl.int32))
            token = 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32)
            tl.store(out_tokens_ptr + row * out_tokens_m + rank, token)
            tl.store(out_logprobs_ptr + row * out_logprobs_m + rank, value - largest - total)
        else:
            tl.store(out_keys_ptr + row * out_keys_m + rank, best)
        won = key == best
        head = tl.where(won, head + 1, head)
        left = won & (part < parts) & (head < K)
        key = tl.where(won, tl.load(keys_ptr + head, mask=left, other=NO_KEY), key)


def _chunk_keys(logits: Tensor, k: int, vocab_start: int) -> tuple[Tensor, Tensor]:
    """Keys `[M, chunks, K]` and masses `[M, chunks]` of every chunk."""
    rows, vocab = logits.shape
    chunks = triton.cdiv(vocab, _GROUPS * _GROUP_SIZE)
    keys = torch.empty((rows, chunks, k), dtype=torch.int64, device=logits.device)
    mass = torch.empty((rows, chunks), dtype=torch.float32, device=logits.device)
    _chunk_kernel[(rows, chunks)](
        logits,
        keys,
        mass,
        vocab,
        vocab_start,
        chunks,
        *logits.stride(),
        K=k,
        NO_KEY=_NO_KEY,
        GROUPS=_GROUPS,
        SIZE=_GROUP_SIZE,
        num_warps=1,
    )
    return keys, mass


def _merge(
    keys: Tensor,
    mass: Tensor,
    k: int,
    partial: tuple[Tensor, Tensor] | None = None,
    final: tuple[Tensor, Tensor] | None = None,
) -> None:
    rows, parts, _ = keys.shape
    out_keys, out_mass = partial or (keys, mass)
    out_tokens, out_logprobs = final or (keys, mass)
    _merge_kernel[(rows,)](
        keys,
        mass,
        out_keys,
        out_mass,
        out_tokens,
        out_logprobs,
        parts,
        keys.stride(0),
        keys.stride(1),
        mass.stride(0),
        out_keys.stride(0),
        out_tokens.stride(0),
        out_logprobs.stride(0),
        K=k,
        NO_KEY=_NO_KEY,
        FINAL=final is not None,
        BLOCK=max(32, triton.next_power_of_2(parts)),
        num_warps=1,
    )


def topk_partial_triton(
    logits: Tensor, k: int, vocab_start: int, out_keys: Tensor, out_mass: Tensor
) -> None:
    """Chunks, then each row's chunks merged; see `topk_partial`."""
    _merge(*_chunk_keys(logits, k, vocab_start), k, partial=(out_keys, out_mass))


def merge_topk_triton(keys: Tensor, mass: Tensor, out_tokens: Tensor, out_logprobs: Tensor) -> None:
    """One program per row; see `merge_topk`."""
    _merge(keys, mass, out_tokens.shape[1], final=(out_tokens, out_logprobs))


def topk_logprobs_triton(logits: Tensor, k: int, out_tokens: Tensor, out_logprobs: Tensor) -> None:
    """Chunks, then each row's chunks merged and normalised; see `topk_logprobs`."""
    _merge(*_chunk_keys(logits, k, 0), k, final=(out_tokens, out_logprobs))


def _check_k(op: str, k: int) -> None:
    if not 1 <= k <= _MAX_K:
        raise ValueError(f"{op}: k must be in 1..{_MAX_K}, got {k}")


def topk_partial(
    logits: Tensor, k: int, vocab_start: int, out_keys: Tensor, out_mass: Tensor
) -> None:
    """Reduce one slice of the vocabulary to what `merge_topk` needs of it.

    Args:
        logits: `[M, V]` fp32, bf16 or fp16, any strides: tokens vocab_start .. vocab_start + V - 1.
            A slice padded for even sharding must be cut to its real tokens.
        k: candidates to keep; a slice of fewer tokens fills up with keys that never win.
        vocab_start: global id of the slice's first token.
        out_keys: `[M, K]` int64, written, best first.
        out_mass: `[M]` fp32, log sum exp(logit - largest logit) over the slice, written.

    Raises:
        ValueError, TypeError: shapes or dtypes do not fit together.
    """
    op = "topk_partial"
    check(op, "logits", logits, (None, None), *_FLOATS, strided=True)
    check(op, "out_keys", out_keys, (logits.shape[0], k), torch.int64)
    check(op, "out_mass", out_mass, (logits.shape[0],), torch.float32)
    _check_k(op, k)
    run = topk_partial_triton if on_gpu(logits) else topk_partial_reference
    run(logits, k, vocab_start, out_keys, out_mass)


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
    _check_k(op, k)
    run = merge_topk_triton if on_gpu(keys) else merge_topk_reference
    run(keys, mass, out_tokens, out_logprobs)


def topk_logprobs(logits: Tensor, k: int, out_tokens: Tensor, out_logprobs: Tensor) -> None:
    """Write the K likeliest tokens of every row and their log-probabilities.

    Args:
        logits: `[M, V]` fp32, bf16 or fp16, any strides; sums are taken in fp32.
        k: how many to keep, at most V.
        out_tokens: `[M, K]` int32, by descending logit, then ascending id, written.
        out_logprobs: `[M, K]` fp32, their log-softmax over V, written.

    Raises:
        ValueError, TypeError: shapes or dtypes do not fit together, or k > V.
    """
    op = "topk_logprobs"
    check(op, "logits", logits, (None, None), *_FLOATS, strided=True)
    _check_k(op, k)
    if k > logits.shape[1]:
        raise ValueError(f"{op}: k must be at most {logits.shape[1]} (the vocabulary), got {k}")
    check(op, "out_tokens", out_tokens, (logits.shape[0], k), torch.int32)
    check(op, "out_logprobs", out_logprobs, (logits.shape[0], k), torch.float32)
    run = topk_logprobs_triton if on_gpu(logits) else topk_logprobs_reference
    run(logits, k, out_tokens, out_logprobs)
