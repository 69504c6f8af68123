# SPDX-License-Identifier: Apache-2.0
"""Add an n-gram draft to the drafter's per-position candidates.

Let w(m) be the probability that its next token is right after a match of m tokens. A node on the
n-gram draft has the children

    q'(x) = (1 - w) q(x) + w [x = c]            c: the draft's next token, w = w(m + depth)

and a node off it has the drafter's own row q(x). Beyond the drafted depth q is 0 and only the
n-gram draft continues. One additional row per depth, `ngram_rows`, therefore suffices, for the
nodes on it (the root is one); the candidates are unchanged. A token that is not one of them is an
additional candidate. With a row for each candidate above, q is 0 after such a token.

w = (successes + 16 prior) / (trials + 16), by `find_ngram`'s counts. Counts are halved when trials
exceed 1,024, so w adapts to the traffic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeVar

import numpy as np
import torch
from torch import Tensor

from bastion_kernels.draft.best_first import ReadsCandidates
from bastion_kernels.draft.ngram_table import LONGEST
from bastion_kernels.op import padded, public
from bastion_kernels.triton_or_none import tl, triton

# by match length; measured with SmolLM2-135M on Spec-Bench, GSM8K and HumanEval, smoothed
_PRIOR = (0.0, 0.0, 0.51, 0.58, 0.62, 0.66, 0.72, 0.8, 0.88, 0.9, 0.92, 0.93, 0.94, 0.95, 0.955,
          0.96)  # fmt: skip
_PRIOR_TRIALS = 16.0
_MOST_TRIALS = 1024
_Array = TypeVar("_Array", Tensor, np.ndarray)


def ngram_priors(device: torch.device | None = None) -> Tensor:
    """`[66]` fp32: w by match length before any trial, in own text and in others'."""
    rest = [0.97] * (LONGEST + 1 - len(_PRIOR))
    return torch.tensor(2 * [*_PRIOR, *rest], dtype=torch.float32, device=device)


def ngram_chances(counts: _Array, priors: _Array) -> _Array:
    """`[66]`: w by match length. counts: `[2, 66]` trials and successes; priors: `[66]`.

    Of tensors or of NumPy's arrays.
    """
    trials, right = counts
    return (right + _PRIOR_TRIALS * priors) / (trials + _PRIOR_TRIALS)


@triton.jit(do_not_specialize=["R"])
def _mix_kernel(
    drafts,
    lengths,
    slots,
    found,
    last,
    counts,
    priors,
    arrived,
    candidates,
    logprobs,
    tokens,
    places,
    ngram_rows,
    expected,
    R,
    stride_drafts_s,
    stride_candidates_r,
    stride_candidates_d,
    stride_candidates_m,
    stride_logprobs_r,
    stride_logprobs_d,
    stride_logprobs_p,
    stride_logprobs_m,
    stride_tokens_r,
    stride_places_r,
    stride_ngram_rows_r,
    D: tl.constexpr,
    M: tl.constexpr,
    L: tl.constexpr,
    STATELESS: tl.constexpr,
    LONGEST: tl.constexpr,
    TRIALS: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Grid: (R,). The last program to finish halves counts."""
    i_r = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + i_r)
    if slot >= 0:
        key = tl.load(found + slot)
        start, code = (key & 0xFFFFFFFF).to(tl.int32), (key >> 32).to(tl.int32)
        match = code >> 1
        length = tl.load(lengths + slot)
        tl.store(last + 3 * slot, start)
        tl.store(last + 3 * slot + 1, code)
        tl.store(last + 3 * slot + 2, length)
        o_l = tl.arange(0, BLOCK_L)
        drafts += slot * stride_drafts_s
        tokens += i_r * stride_tokens_r
        places += i_r * stride_places_r
        ngram_rows += i_r * stride_ngram_rows_r
        b_token = tl.load(drafts + o_l, mask=(o_l < L) & (match > 0), other=-1)
        tl.store(tokens + o_l, b_token, mask=o_l < L)
        place = tl.where(match > 0, M, -1)
        tl.store(places + o_l, place, mask=(o_l < L) & ((match == 0) | (o_l >= D)))
        total, path = 0.0, 1.0
        if match > 0:
            o_m = tl.arange(0, BLOCK_M)
            state = tl.full([], 0, tl.int32)
            first = (1 - (code & 1)) * (LONGEST + 1)
            for depth in range(L):
                at = first + tl.minimum(match + depth, LONGEST)
                trials = tl.load(counts + at).to(tl.float32)
                right = tl.load(counts + 2 * (LONGEST + 1) + at).to(tl.float32)
                w = (right + TRIALS * tl.load(priors + at)) / (trials + TRIALS)
                path *= w
                total += path
                token = tl.load(drafts + depth)
                m_m = (o_m < M) & (depth < D)
                b_found = tl.load(
                    candidates + i_r * stride_candidates_r + depth * stride_candidates_d
                    + o_m * stride_candidates_m,
                    mask=m_m,
                    other=-1,
                )  # fmt: skip
                here = tl.min(tl.where(m_m & (b_found == token), o_m, M), 0)
                b_logprob = tl.load(
                    logprobs + i_r * stride_logprobs_r + depth * stride_logprobs_d
                    + state * stride_logprobs_p + o_m * stride_logprobs_m,
                    mask=m_m & (state >= 0),
                    other=float("-inf"),
                )  # fmt: skip
                b_logprob = tl.where(
                    b_logprob == b_logprob, tl.minimum(b_logprob, 0.0), float("-inf")
                )
                b_mixed = (1.0 - w) * tl.exp(b_logprob) + tl.where(o_m == here, w, 0.0)
                b_mixed = tl.where(o_m == here, tl.log(b_mixed), b_logprob + tl.log(1.0 - w))
                b_mixed = tl.where(b_mixed == b_mixed, b_mixed, float("-inf"))
                tl.store(ngram_rows + depth * (M + 1) + o_m, b_mixed, mask=o_m <= M)
                if depth < D:
                    tl.store(places + depth, here)
                if not STATELESS:
                    state = tl.where(here < M, here, -1)
        tl.store(expected + slot, total)
    # all threads must have read the counts before the program counts as arrived
    tl.debug_barrier()
    if tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == R - 1:
        tl.store(arrived, 0)
        o_c = tl.arange(0, BLOCK_C)
        m_c = o_c < 2 * (LONGEST + 1)
        b_trials = tl.load(counts + o_c, mask=m_c, other=0)
        b_right = tl.load(counts + 2 * (LONGEST + 1) + o_c, mask=m_c, other=0)
        m_full = m_c & (b_trials > MOST)
        tl.store(counts + o_c, b_trials >> 1, mask=m_full)
        tl.store(counts + 2 * (LONGEST + 1) + o_c, b_right >> 1, mask=m_full)


@dataclass(slots=True)
class MixNgram(ReadsCandidates):
    """Write the additional rows for the n-gram drafts of `find_ngram`; see the module."""

    drafts: Annotated[Tensor, "[S, *] int32"]  # of `find_ngram`, at least L tokens
    lengths: Annotated[Tensor, "[S] int32"]  # number of tokens
    slots: Annotated[Tensor, "[R] int64"]  # request slot of each row, or -1
    found: Annotated[Tensor, "[S] int64"]  # of `find_ngram`
    last: Annotated[Tensor, "[S, 3] int32"]  # written: the draft, for the next `find_ngram`
    # Trials and successes by match length, see `find_ngram`; large counts are halved.
    counts: Annotated[Tensor, "[2, 66] int32"]
    priors: Annotated[Tensor, "[66] float32"]  # see `ngram_priors`
    arrived: Annotated[Tensor, "[1] int32"]  # 0 before and after
    candidates: Annotated[Tensor, "[R, D, M] int32, strided"]  # D may be 0
    logprobs: Annotated[Tensor, "[R, D, P, M] float32, strided"]  # as in `expand_best_first`
    tokens: Annotated[Tensor, "[R, L] int32"]  # written: the n-gram draft, -1 if there is none
    # Written: its token's index among the candidates, M where it is not one of them, -1 if there is
    # no n-gram draft.
    places: Annotated[Tensor, "[R, L] int32"]
    # Written for rows with one: log q' of each candidate, then of its token if that is not one of
    # them.
    ngram_rows: Annotated[Tensor, "[R, L, M + 1] float32"]
    expected: Annotated[Tensor, "[S] float32"]  # written: expected right tokens of the draft's L

    def check(self) -> None:
        ReadsCandidates.check(self)
        depth, length = self.candidates.shape[1], self.tokens.shape[1]
        if length < depth:
            raise ValueError(f"{self.name}: L must be at least D = {depth}, got {length}")

    def triton(self) -> None:
        reqs, _, width = self.candidates.shape
        self.launch(
            _mix_kernel,
            reqs,
            stride_logprobs_p=self.stride_of_rows,
            STATELESS=self.stateless,
            LONGEST=LONGEST,
            TRIALS=_PRIOR_TRIALS,
            MOST=_MOST_TRIALS,
            BLOCK_L=padded(self.tokens.shape[1]),
            BLOCK_M=padded(width + 1),
            BLOCK_C=padded(2 * (LONGEST + 1)),
            num_warps=1,
        )


mix_ngram = public(MixNgram, cpu="bastion_kernels.cpu.ngram")
