# SPDX-License-Identifier: Apache-2.0
"""The K most likely tokens of every drafted position, with their log-probabilities.

    out_logprobs[m, i] = logits[m, out_tokens[m, i]] - log sum_v exp(logits[m, v])

sorted by descending logit, then by token id. Under tensor parallelism each rank holds a slice of
the vocabulary, see `policy.trees`.

NaN ranks as -inf; a row with a NaN gets NaN for all its log-probabilities.

Two launches, one warp per program, no sort. `_maxima_kernel` streams the logits once, in chunks of
2,048. It stores the maximum of every segment of 64, and the mass and the best segment of every
chunk. `_pop_kernel`, one warp per row, has the best logit of every chunk in registers. K times it
takes the best of these, and reads its segment again for the next one. Tokens already taken need no
record: they precede the last one in the total order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from bastion_kernels.op import Op, cdiv, padded, public
from bastion_kernels.triton_or_none import tl, triton

_SEGMENTS, _SEGMENT = 32, 64  # segments of a chunk, logits of a segment
_MAX_K = 1024  # one round each
_NO_HEAD = -(2**63)  # below every head of a chunk


@triton.jit
def _order(b_value):
    """int32 above -2^31 that sorts like the fp32 value."""
    b_value = tl.where(b_value == b_value, b_value, float("-inf")) + 0.0  # -0.0 becomes 0.0
    b_bits = b_value.to(tl.int32, bitcast=True)
    return b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)


@triton.jit
def unorder(b_order):
    """The inverse of `_order`."""
    return (b_order ^ ((b_order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def shift_of(largest):
    """The shift before exp; 0 if all logits are -inf, which gives log 0 instead of NaN."""
    return tl.where(largest > float("-inf"), largest, 0.0)


@triton.jit
def _maxima_kernel(
    logits,
    maxima,
    heads,
    mass,
    V,
    chunks,
    stride_logits_m,
    stride_logits_v,
    SEGMENTS: tl.constexpr,
    SEGMENT: tl.constexpr,
):
    """Grid: (M, chunks). Writes maxima [M, chunks * SEGMENTS], heads and mass [M, chunks].

    A head is the order of a chunk's best logit << 32 | its segment.
    """
    i_r, i_c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_s = i_c * SEGMENTS + tl.arange(0, SEGMENTS)
    o_v = o_s[:, None] * SEGMENT + tl.arange(0, SEGMENT)[None, :]
    logits += i_r * stride_logits_m + o_v.to(tl.int64) * stride_logits_v
    b_value = tl.load(logits, mask=o_v < V, other=float("-inf")).to(tl.float32)
    b_maxima = tl.max(b_value, 1)  # ignores NaN
    b_maxima = tl.where(b_maxima > float("-inf"), b_maxima, float("-inf"))
    maxima += i_r * (chunks * SEGMENTS) + o_s
    tl.store(maxima, b_maxima.to(maxima.dtype.element_ty))
    top = tl.max(b_maxima, 0)
    first = tl.min(tl.where(b_maxima == top, o_s, 0x7FFFFFFF), 0)
    tl.store(heads + i_r * chunks + i_c, (_order(top).to(tl.int64) << 32) | first)
    b_power = (b_value - shift_of(top)) * 1.4426950408889634  # of 2
    total = tl.sum(tl.sum(tl.exp2(b_power), 1), 0)
    tl.store(mass + i_r * chunks + i_c, tl.log(total))


@triton.jit
def _pop_kernel(
    logits,
    maxima,
    heads,
    mass,
    out_tokens,
    out_logprobs,
    V,
    chunks,
    stride_logits_m,
    stride_logits_v,
    stride_out_tokens_m,
    stride_out_logprobs_m,
    K: tl.constexpr,
    NO_HEAD: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SEGMENT: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
):
    """Grid: (M,). The K best of a row, and their log-probabilities.

    `maxima` has the largest remaining logit of every segment, kept up to date.
    """
    i_r = tl.program_id(0).to(tl.int64)
    logits += i_r * stride_logits_m
    maxima += i_r * (chunks * SEGMENTS)
    o_c = tl.arange(0, CHUNKS_PAD)
    m_c = o_c < chunks
    b_heads = tl.load(heads + i_r * chunks + o_c, mask=m_c, other=NO_HEAD)
    b_head, b_home = (b_heads >> 32).to(tl.int32), b_heads.to(tl.int32)

    b_top = tl.where(m_c, unorder(b_head), float("-inf"))
    largest = shift_of(tl.max(b_top, 0))
    b_mass = tl.load(mass + i_r * chunks + o_c, mask=m_c, other=float("-inf"))
    total = tl.log(tl.sum(tl.exp(shift_of(b_top) - largest + b_mass), 0))

    o_v, o_s = tl.arange(0, SEGMENT), tl.arange(0, SEGMENTS)
    last, last_token = tl.full([], 0x7FFFFFFF, tl.int32), tl.full([], -1, tl.int32)
    for rank in range(K):
        best = tl.max(b_head, 0)
        segment = tl.min(tl.where(b_head == best, b_home, 0x7FFFFFFF), 0)
        b_token = segment * SEGMENT + o_v
        p_value = logits + b_token.to(tl.int64) * stride_logits_v
        # -inf beyond the vocabulary sorts after every token of the vocabulary
        b_value = tl.load(p_value, mask=b_token < V, other=float("-inf")).to(tl.float32)
        o_other = segment // SEGMENTS * SEGMENTS + o_s
        b_rest = tl.load(maxima + o_other).to(tl.float32)
        b_rest = tl.where((b_rest == b_rest) & (o_other != segment), _order(b_rest), -0x80000000)

        # ties are taken by token id, so earlier rounds took the ones up to `last_token`
        b_order = _order(b_value)
        m_equal = (b_order == best) & (b_token > tl.where(best < last, -1, last_token))
        winner = tl.min(tl.where(m_equal, b_token, 0x7FFFFFFF), 0)
        more = tl.max(tl.where(m_equal, b_token, -1), 0) > winner
        lower = tl.max(tl.where(b_order < best, b_order, -0x80000000), 0)
        left = tl.where(more, best, lower)
        last, last_token = best, winner

        rest_best = tl.max(b_rest, 0)
        rest_home = tl.min(tl.where(b_rest == rest_best, o_other, 0x7FFFFFFF), 0)
        stays = (left > rest_best) | ((left == rest_best) & (segment < rest_home))
        m_here = o_c == segment // SEGMENTS
        b_head = tl.where(m_here, tl.where(stays, left, rest_best), b_head)
        b_home = tl.where(m_here, tl.where(stays, segment, rest_home), b_home)
        left = tl.where(left == -0x80000000, float("nan"), unorder(left))
        tl.store(maxima + segment, left.to(maxima.dtype.element_ty))
        tl.debug_barrier()  # before any thread reads it

        tl.store(out_tokens + i_r * stride_out_tokens_m + rank, winner)
        logprob = unorder(best) - largest - total
        tl.store(out_logprobs + i_r * stride_out_logprobs_m + rank, logprob)


@dataclass(slots=True)
class TopkLogprobs(Op):
    """Write the K most likely tokens of every row and their log-probabilities.

    Raises:
        ValueError, TypeError: shapes or dtypes do not fit together, or k > V.
    """

    logits: Annotated[Tensor, "[M, V] float, strided"]  # any strides; sums are taken in fp32
    k: int  # number of tokens, at most V
    out_tokens: Annotated[Tensor, "[M, K] int32"]  # written: by descending logit, then ascending id
    out_logprobs: Annotated[Tensor, "[M, K] float32"]  # written: their log-softmax over V

    def check(self) -> None:
        self.check_declared(K=self.k)
        vocab = self.logits.shape[1]
        if not 1 <= self.k <= min(vocab, _MAX_K):
            raise ValueError(f"{self.name}: k must be in 1..{min(vocab, _MAX_K)}, got {self.k}")

    def triton(self) -> None:
        (rows, vocab), device = self.logits.shape, self.logits.device
        chunks = cdiv(vocab, _SEGMENTS * _SEGMENT)
        between = {
            "maxima": torch.empty(rows, chunks * _SEGMENTS, dtype=self.logits.dtype, device=device),
            "heads": torch.empty(rows, chunks, dtype=torch.int64, device=device),
            "mass": torch.empty(rows, chunks, dtype=torch.float32, device=device),
            "chunks": chunks,
            "SEGMENTS": _SEGMENTS,
            "SEGMENT": _SEGMENT,
            "num_warps": 1,
        }
        self.launch(_maxima_kernel, rows, chunks, **between)
        width = padded(chunks, 32)
        self.launch(_pop_kernel, rows, NO_HEAD=_NO_HEAD, CHUNKS_PAD=width, **between)


topk_logprobs = public(TopkLogprobs, cpu="bastion_kernels.cpu.topk")
