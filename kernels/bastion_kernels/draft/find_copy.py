# SPDX-License-Identifier: Apache-2.0
"""Lookup: where the end of a request's text occurs earlier in it.

Of the history h of n tokens, prompt and reply, take the place p < n for which

    m = tokens before p that equal the last tokens of h        (at least 2, counted up to 32)

is largest, and of several the latest. The copy c_1, c_2, ... is what follows there, h[p], h[p + 1],
...; where it reaches the end of the history it goes on with itself, so that a repetition of any
period continues. m and p are packed into one integer whose maximum is the answer, in whatever order
blocks of the history are searched: every rank finds the same.

How often a copy is right is learned from what was emitted, whether or not anything was verified.
When the history has grown from n to n' tokens, the copy that was found at n has been tried at
match lengths m, m + 1, ... up to its first wrong token or to n'. `counts` has trials and successes
by match length, in integers, whose sum does not depend on an order either.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bastion_kernels.op import Op, public
from bastion_kernels.triton_or_none import tl, triton

# Shortest match, and the length from which matches are alike.
SHORTEST, LONGEST = 2, 32
_BLOCK = 2048


@triton.jit
def _find_kernel(
    history_ptr,
    lengths_ptr,
    slots_ptr,
    last_ptr,
    counts_ptr,
    found_ptr,
    history_s,
    BLOCK: tl.constexpr,
    SHORTEST: tl.constexpr,
    LONGEST: tl.constexpr,
):
    """Grid: (R, blocks of the longest history). The first block's program also counts."""
    slot = tl.load(slots_ptr + tl.program_id(0))
    if slot >= 0:
        history_ptr += slot * history_s
        length = tl.load(lengths_ptr + slot)
        if tl.program_id(1) == 0:
            start = tl.load(last_ptr + 3 * slot)
            match = tl.load(last_ptr + 3 * slot + 1)
            then = tl.load(last_ptr + 3 * slot + 2)
            ahead = tl.arange(0, LONGEST)
            tried = (match > 0) & (ahead < length - then)
            copied = tl.load(history_ptr + start + ahead, mask=tried, other=0)
            emitted = tl.load(history_ptr + then + ahead, mask=tried, other=0)
            wrong = tl.min(tl.where(tried & (copied != emitted), ahead, LONGEST), 0)
            count_ptr = counts_ptr + tl.minimum(match + ahead, LONGEST)
            tl.atomic_add(count_ptr, 1, mask=tried & (ahead <= wrong))
            tl.atomic_add(count_ptr + LONGEST + 1, 1, mask=tried & (ahead < wrong))
        first = tl.program_id(1) * BLOCK
        if first < length:
            place = first + tl.arange(0, BLOCK)
            # the token at `place` is the last of the match
            alive = place < length - 1
            match = tl.zeros([BLOCK], tl.int32)
            back = tl.full([], 0, tl.int32)
            while (back < LONGEST) & (tl.max(alive.to(tl.int32), 0) > 0):
                wanted = tl.load(history_ptr + length - 1 - back)
                alive = alive & (place >= back)
                token = tl.load(history_ptr + place - back, mask=alive, other=0)
                alive = alive & (token == wanted)
                match += alive.to(tl.int32)
                back += 1
            key = (match.to(tl.int64) << 32) | (place + 1).to(tl.int64)
            key = tl.max(tl.where(match >= SHORTEST, key, 0), 0)
            if key > 0:
                tl.atomic_max(found_ptr + slot, key)


@dataclass(slots=True)
class FindCopy(Op):
    """Find every request's copy, and count how the last one fared; see the module.

    Raises:
        ValueError, TypeError: shapes, strides or dtypes do not fit together.
    """

    history: Tensor
    """`[S, most tokens]` int32, the tokens of each slot's request."""
    lengths: Tensor
    """`[S]` int32, how many of them there are."""
    slots: Tensor
    """`[R]` int64, request slot of each row, or -1."""
    last: Tensor
    """`[S, 3]` int32: p, m and n of the copy that was found last; m is 0 for none."""
    counts: Tensor
    """`[2, 33]` int32, trials and successes by match length; added to."""
    found: Tensor
    """`[S]` int64, 0 for the slots of active rows; written: m << 32 | p, 0 for no match."""

    def check(self) -> None:
        total, _ = self.history.shape
        self.expect("history", (total, None), torch.int32, strided=True)
        self.expect("lengths", (total,), torch.int32)
        self.expect("slots", (None,), torch.int64)
        self.expect("last", (total, 3), torch.int32)
        self.expect("counts", (2, LONGEST + 1), torch.int32)
        self.expect("found", (total,), torch.int64)
        if self.history.stride(1) != 1:
            raise ValueError(f"{self.name}: the tokens of a request must be consecutive")

    def reference(self) -> None:
        """Compare every place with the end."""
        for slot in self.slots.tolist():
            if slot < 0:
                continue
            text = self.history[slot, : int(self.lengths[slot])].tolist()
            start, match, then = self.last[slot].tolist()
            if match:
                for ahead, (copied, emitted) in enumerate(
                    zip(text[start:], text[then : then + LONGEST])
                ):
                    length = min(match + ahead, LONGEST)
                    self.counts[0, length] += 1
                    if copied != emitted:
                        break
                    self.counts[1, length] += 1
            best = 0
            for place in range(SHORTEST, len(text)):
                match = 0
                while match < min(place, LONGEST) and text[place - 1 - match] == text[-1 - match]:
                    match += 1
                if match >= SHORTEST:
                    best = max(best, match << 32 | place)
            self.found[slot] = best

    def triton(self) -> None:
        """One launch over requests and blocks of their history."""
        reqs, most = self.slots.shape[0], self.history.shape[1]
        if reqs:
            _find_kernel[(reqs, triton.cdiv(most, _BLOCK))](
                self.history,
                self.lengths,
                self.slots,
                self.last,
                self.counts,
                self.found,
                self.history.stride(0),
                BLOCK=_BLOCK,
                SHORTEST=SHORTEST,
                LONGEST=LONGEST,
                num_warps=8,
            )


find_copy = public(FindCopy, cpu="bastion_kernels.cpu.copies")
