# SPDX-License-Identifier: Apache-2.0
"""The drafter's lattice with a copy in it.

With w(m) the probability that the next token of a copy is right after a match of m tokens, a node
on the copy has the children

    q'(x) = (1 - w) q(x) + w [x = c]            c: the copy's next token, w = w(m + depth)

and a node off it has q(x), the drafter's own row. Beyond the lattice q is 0 and the copy goes on
alone. So one more row a depth says it all, and the lattice stays as it is: `copy_rows` are read by
nodes on the copy (the root is one), and a copied token that the lattice does not have is a further
candidate. What the lattice's row of a node on the copy is depends on the kind of drafter, as in
`best_first`; where it has none, q is 0.

w is (successes + 16 prior) / (trials + 16) of `find_copy`'s counts. They are halved where the
trials pass 1,024, so that w follows the traffic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bastion_kernels.draft.find_copy import LONGEST
from bastion_kernels.op import Op, public
from bastion_kernels.triton_or_none import tl, triton

# By match length; measured with SmolLM2-135M on Spec-Bench, GSM8K and HumanEval, smoothed.
_PRIOR = (0.0, 0.0, 0.51, 0.58, 0.62, 0.66, 0.72, 0.8, 0.88, 0.9, 0.92, 0.93, 0.94, 0.95, 0.955,
          0.96)  # fmt: skip
_PRIOR_TRIALS = 16.0
_MOST_TRIALS = 1024


def copy_priors(device: torch.device | None = None) -> Tensor:
    """`[33]` fp32: w by match length before anything was tried."""
    rest = [0.97] * (LONGEST + 1 - len(_PRIOR))
    return torch.tensor([*_PRIOR, *rest], dtype=torch.float32, device=device)


def copy_chances(counts: Tensor, priors: Tensor) -> Tensor:
    """`[33]`: w by match length. counts: `[2, 33]` trials and successes; priors: `[33]`."""
    trials, right = counts.to(priors.dtype)
    return (right + _PRIOR_TRIALS * priors) / (trials + _PRIOR_TRIALS)


@triton.jit(do_not_specialize=["reqs"])
def _mix_kernel(
    history_ptr,
    lengths_ptr,
    slots_ptr,
    found_ptr,
    last_ptr,
    counts_ptr,
    priors_ptr,
    arrived_ptr,
    candidates_ptr,
    logprobs_ptr,
    rows_ptr,
    tokens_ptr,
    places_ptr,
    copy_rows_ptr,
    promised_ptr,
    reqs,
    history_s,
    candidates_r,
    candidates_d,
    candidates_m,
    logprobs_r,
    logprobs_d,
    logprobs_p,
    logprobs_m,
    rows_r,
    rows_d,
    rows_p,
    rows_m,
    tokens_r,
    places_r,
    copy_rows_r,
    D: tl.constexpr,
    M: tl.constexpr,
    L: tl.constexpr,
    STATELESS: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    LONGEST: tl.constexpr,
    TRIALS: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Grid: (R,). The last program to finish halves counts."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if slot >= 0:
        key = tl.load(found_ptr + slot)
        tl.store(found_ptr + slot, 0)
        start, match = (key & 0xFFFFFFFF).to(tl.int32), (key >> 32).to(tl.int32)
        length = tl.load(lengths_ptr + slot)
        tl.store(last_ptr + 3 * slot, start)
        tl.store(last_ptr + 3 * slot + 1, match)
        tl.store(last_ptr + 3 * slot + 2, length)
        ahead = tl.arange(0, BLOCK_L)
        period = tl.where(match > 0, length - start, 1)
        history_ptr += slot * history_s + start
        tokens_ptr += row * tokens_r
        places_ptr += row * places_r
        copy_rows_ptr += row * copy_rows_r
        token = tl.load(history_ptr + ahead % period, mask=(ahead < L) & (match > 0), other=-1)
        tl.store(tokens_ptr + ahead, token, mask=ahead < L)
        place = tl.where(match > 0, M, -1)
        tl.store(places_ptr + ahead, place, mask=(ahead < L) & ((match == 0) | (ahead >= D)))
        promised, path = 0.0, 1.0
        if match > 0:
            candidate = tl.arange(0, BLOCK_M)
            state = tl.full([], 0, tl.int32)
            for depth in range(L):
                at = tl.minimum(match + depth, LONGEST)
                trials = tl.load(counts_ptr + at).to(tl.float32)
                right = tl.load(counts_ptr + LONGEST + 1 + at).to(tl.float32)
                w = (right + TRIALS * tl.load(priors_ptr + at)) / (trials + TRIALS)
                path *= w
                promised += path
                copied = tl.load(history_ptr + depth % period)
                in_lattice = (candidate < M) & (depth < D)
                found = tl.load(
                    candidates_ptr + row * candidates_r + depth * candidates_d
                    + candidate * candidates_m,
                    mask=in_lattice,
                    other=-1,
                )  # fmt: skip
                here = tl.min(tl.where(in_lattice & (found == copied), candidate, M), 0)
                logprob = tl.load(
                    logprobs_ptr + row * logprobs_r + depth * logprobs_d + state * logprobs_p
                    + candidate * logprobs_m,
                    mask=in_lattice & (state >= 0),
                    other=float("-inf"),
                )  # fmt: skip
                logprob = tl.where(logprob == logprob, tl.minimum(logprob, 0.0), float("-inf"))
                mixed = (1.0 - w) * tl.exp(logprob) + tl.where(candidate == here, w, 0.0)
                mixed = tl.where(candidate == here, tl.log(mixed), logprob + tl.log(1.0 - w))
                mixed = tl.where(mixed == mixed, mixed, float("-inf"))
                tl.store(copy_rows_ptr + depth * (M + 1) + candidate, mixed, mask=candidate <= M)
                if depth < D:
                    tl.store(places_ptr + depth, here)
                if not STATELESS:
                    if HAS_ROWS:
                        state = tl.load(
                            rows_ptr + row * rows_r + depth * rows_d + state * rows_p
                            + here * rows_m,
                            mask=(here < M) & (state >= 0) & (depth < D),
                            other=-1,
                        )  # fmt: skip
                    else:
                        state = tl.where(here < M, here, -1)
        tl.store(promised_ptr + slot, promised)
    # every count of this program has been read before it counts as finished
    tl.debug_barrier()
    if tl.atomic_add(arrived_ptr, 1, sem="acq_rel", scope="gpu") == reqs - 1:
        tl.store(arrived_ptr, 0)
        at = tl.arange(0, BLOCK_C)
        real = at <= LONGEST
        trials = tl.load(counts_ptr + at, mask=real, other=0)
        right = tl.load(counts_ptr + LONGEST + 1 + at, mask=real, other=0)
        full = real & (trials > MOST)
        tl.store(counts_ptr + at, trials >> 1, mask=full)
        tl.store(counts_ptr + LONGEST + 1 + at, right >> 1, mask=full)


@dataclass(slots=True)
class MixCopy(Op):
    """Write what the copies of `find_copy` add to a lattice; see the module.

    Raises:
        ValueError, TypeError: shapes, strides or dtypes do not fit together.
    """

    history: Tensor
    """`[S, most tokens]` int32, the tokens of each slot's request."""
    lengths: Tensor
    """`[S]` int32, how many of them there are."""
    slots: Tensor
    """`[R]` int64, request slot of each row, or -1."""
    found: Tensor
    """`[S]` int64 of `find_copy`; set to 0 again."""
    last: Tensor
    """`[S, 3]` int32, written: the copy as `find_copy` reads it next time."""
    counts: Tensor
    """`[2, 33]` int32, trials and successes by match length; halved where they are many."""
    priors: Tensor
    """`[33]` fp32, see `copy_priors`."""
    arrived: Tensor
    """`[1]` int32, 0 and left so."""
    candidates: Tensor
    """`[R, D, M]` int32 of the lattice, D may be 0."""
    logprobs: Tensor
    """`[R, D, P, M]` fp32 of the lattice, as in `expand_best_first`."""
    rows: Tensor | None
    """`[R, D, P, M]` int32 of the lattice, or None."""
    tokens: Tensor
    """`[R, L]` int32, written: the copy, -1 if there is none."""
    places: Tensor
    """`[R, L]` int32, written: the copied token's index among the candidates, M where it is
    not one of them, -1 if there is no copy."""
    copy_rows: Tensor
    """`[R, L, M + 1]` fp32, written for rows with a copy: log q' of each candidate, then of the
    copied token if it is not one of them."""
    promised: Tensor
    """`[S]` fp32, written: how many of the copy's L tokens are expected to be right."""

    def check(self) -> None:
        total, _ = self.history.shape
        reqs, depth, width = self.candidates.shape
        length = self.tokens.shape[1]
        self.expect("history", (total, None), torch.int32, strided=True)
        self.expect("lengths", (total,), torch.int32)
        self.expect("slots", (reqs,), torch.int64)
        self.expect("found", (total,), torch.int64)
        self.expect("last", (total, 3), torch.int32)
        self.expect("counts", (2, LONGEST + 1), torch.int32)
        self.expect("priors", (LONGEST + 1,), torch.float32)
        self.expect("arrived", (1,), torch.int32)
        self.expect("candidates", (reqs, depth, width), torch.int32, strided=True)
        self.expect("logprobs", (reqs, depth, None, width), torch.float32, strided=True)
        if self.rows is not None:
            self.expect("rows", tuple(self.logprobs.shape), torch.int32, strided=True)
        self.expect("tokens", (reqs, length), torch.int32)
        self.expect("places", (reqs, length), torch.int32)
        self.expect("copy_rows", (reqs, length, width + 1), torch.float32)
        self.expect("promised", (total,), torch.float32)
        if length < depth:
            raise ValueError(f"{self.name}: L must be at least D = {depth}, got {length}")

    @property
    def stateless(self) -> bool:
        """Whether all nodes of a depth share one row."""
        return self.rows is None and self.logprobs.shape[2] == 1

    def reference(self) -> None:
        """Depth by depth, in double precision."""
        _, depths, width = self.candidates.shape
        chances = copy_chances(self.counts, self.priors.double())
        for r, slot in enumerate(self.slots.tolist()):
            if slot < 0:
                continue
            match, start = int(self.found[slot]) >> 32, int(self.found[slot]) & 0xFFFFFFFF
            text = self.history[slot, : int(self.lengths[slot])].tolist()
            self.found[slot] = 0
            self.last[slot] = torch.tensor([start, match, len(text)])
            self.tokens[r], self.places[r] = -1, -1
            state, path, promised = 0, 1.0, 0.0
            for depth in range(self.tokens.shape[1] if match else 0):
                text.append(text[start + depth])
                chance = float(chances[min(match + depth, LONGEST)])
                path *= chance
                promised += path
                mixed, here = torch.zeros(width + 1, dtype=torch.float64), width
                if depth < depths:
                    tokens = self.candidates[r, depth].tolist()
                    here = tokens.index(text[-1]) if text[-1] in tokens else width
                    if state >= 0:
                        own = self.logprobs[r, depth, state].double().clamp(max=0.0).exp()
                        mixed[:width] = (1.0 - chance) * own.nan_to_num(0.0)
                mixed[here] += chance
                self.tokens[r, depth], self.places[r, depth] = text[-1], here
                self.copy_rows[r, depth] = mixed.log()
                if not self.stateless:
                    known = here < width and state >= 0
                    if self.rows is None:
                        state = here if here < width else -1
                    else:
                        state = int(self.rows[r, depth, state, here]) if known else -1
            self.promised[slot] = promised
        full = self.counts[0] > _MOST_TRIALS
        self.counts[:, full] = self.counts[:, full] // 2

    def triton(self) -> None:
        """One launch, a program for each request."""
        reqs, depth, width = self.candidates.shape
        if reqs == 0:
            return
        length = self.tokens.shape[1]
        rows = self.candidates if self.rows is None else self.rows
        _mix_kernel[(reqs,)](
            self.history,
            self.lengths,
            self.slots,
            self.found,
            self.last,
            self.counts,
            self.priors,
            self.arrived,
            self.candidates,
            self.logprobs,
            rows,
            self.tokens,
            self.places,
            self.copy_rows,
            self.promised,
            reqs,
            self.history.stride(0),
            *self.candidates.stride(),
            *self.logprobs.stride(),
            *((0, 0, 0, 0) if self.rows is None else rows.stride()),
            self.tokens.stride(0),
            self.places.stride(0),
            self.copy_rows.stride(0),
            D=depth,
            M=width,
            L=length,
            STATELESS=self.stateless,
            HAS_ROWS=self.rows is not None,
            LONGEST=LONGEST,
            TRIALS=_PRIOR_TRIALS,
            MOST=_MOST_TRIALS,
            BLOCK_L=triton.next_power_of_2(length),
            BLOCK_M=triton.next_power_of_2(width + 1),
            BLOCK_C=triton.next_power_of_2(LONGEST + 1),
            num_warps=1,
        )


mix_copy = public(MixCopy, cpu="bastion_kernels.cpu.copies")
