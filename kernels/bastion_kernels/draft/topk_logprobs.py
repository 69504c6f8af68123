# SPDX-License-Identifier: Apache-2.0
"""The K likeliest tokens of every drafted position, with their log-probabilities.

    out_logprobs[m, i] = logits[m, out_tokens[m, i]] - log sum_v exp(logits[m, v])

sorted by logit, descending; equal logits in order of token id. Under tensor parallelism each rank
holds a slice of the vocabulary: `topk_partial` gives its K best as sortable 64-bit keys and its
mass, log sum exp(logit - largest logit of the slice); the ranks exchange these (M * (8 K + 4)
bytes), and `merge_topk` gives what one rank with the whole vocabulary would have.

NaN counts as -inf in the choice; a row with a NaN has NaN for all its log-probabilities.

Two launches, one warp per program, no sort. `_maxima_kernel` streams the logits once, in chunks of
2,048 (the 15 rows of one request make 1,125 programs at V = 151,936). It keeps the maximum of every
segment of 64, and of every chunk the mass and the best segment. `_pop_kernel`, a warp to a row,
takes the best of the row K times. It holds the best of every chunk, 4 each thread at that V, so the
best of all is a reduction within the warp. The segment it comes from is read again, for the token
and for what is left in it, and beside it the maxima of the other segments of its chunk, for the
next best of the chunk. What was taken before needs no record but in these maxima: it is what
precedes the last token taken in the total order.

A round is two loads side by side and seven integer reductions (`redux.sync`), 123 instructions for
sm_90. Memory traffic is that of the logits, M * V * itemsize bytes, and some 2% for the maxima.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bastion_kernels.draft.topk_merge import (
    MAX_TOKEN,
    NO_KEY,
    check_k,
    merge_topk,
    shift_of,
    unorder,
)
from bastion_kernels.op import Op, public
from bastion_kernels.triton_or_none import tl, triton

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_SEGMENTS, _SEGMENT = 32, 64  # segments of a chunk, logits of a segment


@triton.jit
def _order(value):
    """int32 above -2^31 that sorts like the fp32 `value`."""
    value = tl.where(value == value, value, float("-inf")) + 0.0  # -0.0 becomes 0.0
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _maxima_kernel(
    logits_ptr,
    maxima_ptr,
    heads_ptr,
    mass_ptr,
    vocab,
    chunks,
    logits_m,
    logits_v,
    SEGMENTS: tl.constexpr,
    SEGMENT: tl.constexpr,
):
    """Grid: (M, chunks). Writes maxima [M, chunks * SEGMENTS], heads and mass [M, chunks].

    A head is the order of a chunk's best logit << 32 | the segment it is in.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    segment = chunk * SEGMENTS + tl.arange(0, SEGMENTS)
    token = segment[:, None] * SEGMENT + tl.arange(0, SEGMENT)[None, :]
    logits_ptr += row * logits_m + token.to(tl.int64) * logits_v
    value = tl.load(logits_ptr, mask=token < vocab, other=float("-inf")).to(tl.float32)
    maxima = tl.max(value, 1)  # of what is not NaN
    maxima = tl.where(maxima > float("-inf"), maxima, float("-inf"))
    maxima_ptr += row * (chunks * SEGMENTS) + segment
    tl.store(maxima_ptr, maxima.to(maxima_ptr.dtype.element_ty))
    top = tl.max(maxima, 0)
    first = tl.min(tl.where(maxima == top, segment, 0x7FFFFFFF), 0)
    tl.store(heads_ptr + row * chunks + chunk, (_order(top).to(tl.int64) << 32) | first)
    power = (value - shift_of(top)) * 1.4426950408889634  # of 2
    total = tl.sum(tl.sum(tl.exp2(power), 1), 0)
    tl.store(mass_ptr + row * chunks + chunk, tl.log(total))


@triton.jit
def _pop_kernel(
    logits_ptr,
    maxima_ptr,
    heads_ptr,
    mass_ptr,
    out_keys_ptr,
    out_mass_ptr,
    out_tokens_ptr,
    out_logprobs_ptr,
    vocab,
    vocab_start,
    chunks,
    logits_m,
    logits_v,
    out_keys_m,
    out_tokens_m,
    out_logprobs_m,
    K: tl.constexpr,
    NO_KEY: tl.constexpr,
    FINAL: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SEGMENT: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
):
    """Grid: (M,). The K best of a row: keys and mass, or if FINAL tokens and log-probabilities.

    Of every segment, the order of the best logit left is in `maxima`, kept up to date.
    """
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_m
    maxima_ptr += row * (chunks * SEGMENTS)
    chunk = tl.arange(0, CHUNKS_PAD)
    real = chunk < chunks
    heads = tl.load(heads_ptr + row * chunks + chunk, mask=real, other=NO_KEY)
    head, home = (heads >> 32).to(tl.int32), heads.to(tl.int32)

    top = tl.where(real, unorder(head), float("-inf"))
    largest = shift_of(tl.max(top, 0))
    mass = tl.load(mass_ptr + row * chunks + chunk, mask=real, other=float("-inf"))
    total = tl.log(tl.sum(tl.exp(shift_of(top) - largest + mass), 0))
    if not FINAL:
        tl.store(out_mass_ptr + row, total)

    member, sibling = tl.arange(0, SEGMENT), tl.arange(0, SEGMENTS)
    last, last_token = tl.full([], 0x7FFFFFFF, tl.int32), tl.full([], -1, tl.int32)
    for rank in range(K):
        best = tl.max(head, 0)
        segment = tl.min(tl.where(head == best, home, 0x7FFFFFFF), 0)
        token = segment * SEGMENT + member
        value_ptr = logits_ptr + token.to(tl.int64) * logits_v
        # beyond the vocabulary there is -inf, which comes after every token of the vocabulary
        value = tl.load(value_ptr, mask=token < vocab, other=float("-inf")).to(tl.float32)
        other = segment // SEGMENTS * SEGMENTS + sibling
        rest = tl.load(maxima_ptr + other).to(tl.float32)
        rest = tl.where((rest == rest) & (other != segment), _order(rest), -0x80000000)

        # equals are taken by token, so those of an earlier round are the ones up to the last
        order = _order(value)
        equal = (order == best) & (token > tl.where(best < last, -1, last_token))
        winner = tl.min(tl.where(equal, token, 0x7FFFFFFF), 0)
        more = tl.max(tl.where(equal, token, -1), 0) > winner
        lower = tl.max(tl.where(order < best, order, -0x80000000), 0)
        left = tl.where(more, best, lower)
        last, last_token = best, winner

        rest_best = tl.max(rest, 0)
        rest_home = tl.min(tl.where(rest == rest_best, other, 0x7FFFFFFF), 0)
        stays = (left > rest_best) | ((left == rest_best) & (segment < rest_home))
        here = chunk == segment // SEGMENTS
        head = tl.where(here, tl.where(stays, left, rest_best), head)
        home = tl.where(here, tl.where(stays, segment, rest_home), home)
        left = tl.where(left == -0x80000000, float("nan"), unorder(left))
        tl.store(maxima_ptr + segment, left.to(maxima_ptr.dtype.element_ty))
        tl.debug_barrier()  # before any thread reads it

        if FINAL:
            tl.store(out_tokens_ptr + row * out_tokens_m + rank, winner)
            logprob = unorder(best) - largest - total
            tl.store(out_logprobs_ptr + row * out_logprobs_m + rank, logprob)
        else:
            key = (best.to(tl.int64) << 32) | (0x7FFFFFFF - winner - vocab_start).to(tl.int64)
            tl.store(out_keys_ptr + row * out_keys_m + rank, tl.where(winner < vocab, key, NO_KEY))


def _pop(
    logits: Tensor,
    k: int,
    vocab_start: int,
    partial: tuple[Tensor, Tensor] | None = None,
    final: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Maxima, then the K best, as keys and mass or as tokens and log-probabilities."""
    rows, vocab = logits.shape
    chunks = triton.cdiv(vocab, _SEGMENTS * _SEGMENT)
    device = logits.device
    maxima = torch.empty((rows, chunks * _SEGMENTS), dtype=logits.dtype, device=device)
    heads = torch.empty((rows, chunks), dtype=torch.int64, device=device)
    mass = torch.empty((rows, chunks), dtype=torch.float32, device=device)
    out_keys, out_mass = partial or (heads, mass)
    out_tokens, out_logprobs = final or (heads, mass)
    _maxima_kernel[(rows, chunks)](
        logits,
        maxima,
        heads,
        mass,
        vocab,
        chunks,
        *logits.stride(),
        SEGMENTS=_SEGMENTS,
        SEGMENT=_SEGMENT,
        num_warps=1,
    )
    _pop_kernel[(rows,)](
        logits,
        maxima,
        heads,
        mass,
        out_keys,
        out_mass,
        out_tokens,
        out_logprobs,
        vocab,
        vocab_start,
        chunks,
        *logits.stride(),
        out_keys.stride(0),
        out_tokens.stride(0),
        out_logprobs.stride(0),
        K=k,
        NO_KEY=NO_KEY,
        FINAL=final is not None,
        SEGMENTS=_SEGMENTS,
        SEGMENT=_SEGMENT,
        CHUNKS_PAD=max(32, triton.next_power_of_2(chunks)),
        num_warps=1,
    )


@dataclass(slots=True)
class TopkPartial(Op):
    """Reduce one slice of the vocabulary to what `merge_topk` needs of it.

    Raises:
        ValueError, TypeError: shapes or dtypes do not fit together.
    """

    logits: Tensor
    """`[M, V]` fp32, bf16 or fp16, any strides: tokens vocab_start .. vocab_start + V - 1. A slice
    padded for even sharding must be cut to its real tokens."""
    k: int
    """Candidates to keep; a slice of fewer tokens fills up with keys that never win."""
    vocab_start: int
    """Global id of the slice's first token."""
    out_keys: Tensor
    """`[M, K]` int64, written, best first."""
    out_mass: Tensor
    """`[M]` fp32, log sum exp(logit - largest logit) over the slice, written."""

    def check(self) -> None:
        self.expect("logits", (None, None), *_FLOATS, strided=True)
        self.expect("out_keys", (self.logits.shape[0], self.k), torch.int64)
        self.expect("out_mass", (self.logits.shape[0],), torch.float32)
        check_k(self.name, self.k)

    def reference(self) -> None:
        """Keys of the `k` best of one vocabulary slice."""
        values = self.logits.float()
        # -0.0 becomes 0.0: equal logits must have equal keys
        bits = (torch.where(values.isnan(), -torch.inf, values) + 0.0).view(torch.int32)
        ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
        vocab = self.logits.shape[1]
        token = self.vocab_start + torch.arange(vocab, device=self.logits.device)
        keys = (ordered << 32) | (MAX_TOKEN - token)
        best = keys.topk(min(self.k, vocab), dim=1).values
        self.out_keys.fill_(NO_KEY)
        self.out_keys[:, : best.shape[1]] = best
        largest = values.amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
        self.out_mass.copy_((values - largest).logsumexp(1))

    def triton(self) -> None:
        """Two launches."""
        _pop(self.logits, self.k, self.vocab_start, partial=(self.out_keys, self.out_mass))


topk_partial = public(TopkPartial)


@dataclass(slots=True)
class TopkLogprobs(Op):
    """Write the K likeliest tokens of every row and their log-probabilities.

    Raises:
        ValueError, TypeError: shapes or dtypes do not fit together, or k > V.
    """

    logits: Tensor
    """`[M, V]` fp32, bf16 or fp16, any strides; sums are taken in fp32."""
    k: int
    """How many to keep, at most V."""
    out_tokens: Tensor
    """`[M, K]` int32, by descending logit, then ascending id, written."""
    out_logprobs: Tensor
    """`[M, K]` fp32, their log-softmax over V, written."""

    def check(self) -> None:
        self.expect("logits", (None, None), *_FLOATS, strided=True)
        check_k(self.name, self.k)
        rows, vocab = self.logits.shape
        if self.k > vocab:
            raise ValueError(
                f"{self.name}: k must be at most {vocab} (the vocabulary), got {self.k}"
            )
        self.expect("out_tokens", (rows, self.k), torch.int32)
        self.expect("out_logprobs", (rows, self.k), torch.float32)

    def reference(self) -> None:
        """One slice that is the whole vocabulary."""
        rows, device = self.logits.shape[0], self.logits.device
        keys = torch.empty((rows, 1, self.k), dtype=torch.int64, device=device)
        mass = torch.empty((rows, 1), dtype=torch.float32, device=device)
        topk_partial.reference(self.logits, self.k, 0, keys[:, 0], mass[:, 0])
        merge_topk.reference(keys, mass, self.out_tokens, self.out_logprobs)

    def triton(self) -> None:
        """Two launches."""
        _pop(self.logits, self.k, 0, final=(self.out_tokens, self.out_logprobs))


topk_logprobs = public(TopkLogprobs, cpu="bastion_kernels.cpu.draft")
