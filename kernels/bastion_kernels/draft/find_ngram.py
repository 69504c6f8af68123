# SPDX-License-Identifier: Apache-2.0
"""Prompt lookup: find an earlier occurrence of the end of a request's text.

In the history h of n tokens (prompt and reply), find the position p < n with the largest

    m = tokens before p that equal the last tokens of h        (at least 2, counted up to 32)

Ties go to the latest p. The n-gram draft c_1, c_2, ... is the text that follows: h[p], h[p + 1],
... At the end of the history it continues with itself, so repetitions of any period continue. m and
p are packed into one integer. Its maximum does not depend on the order in which blocks of the
history are searched, so all ranks find the same draft.

The success rate is learned from the emitted tokens, whether or not a draft was verified. When the
history has grown from n to n' tokens, the draft found at n has been tried at match lengths m,
m + 1, ..., up to its first wrong token or to n'. `counts` has trials and successes by match length;
integer sums do not depend on the order either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from bastion_kernels.op import Op, cdiv, public
from bastion_kernels.triton_or_none import tl, triton

# shortest match, and the length from which all matches are treated alike
SHORTEST, LONGEST = 2, 32
_BLOCK = 2048


@triton.jit
def _find_kernel(
    history,
    lengths,
    slots,
    last,
    counts,
    found,
    stride_history_s,
    BLOCK: tl.constexpr,
    SHORTEST: tl.constexpr,
    LONGEST: tl.constexpr,
):
    """Grid: (R, blocks of the longest history). The first block's program also counts."""
    i_r = tl.program_id(0)
    slot = tl.load(slots + i_r)
    if slot >= 0:
        history += slot * stride_history_s
        length = tl.load(lengths + slot)
        i_b = tl.program_id(1)
        if i_b == 0:
            start = tl.load(last + 3 * slot)
            match = tl.load(last + 3 * slot + 1)
            then = tl.load(last + 3 * slot + 2)
            o_a = tl.arange(0, LONGEST)
            m_tried = (match > 0) & (o_a < length - then)
            b_draft = tl.load(history + start + o_a, mask=m_tried, other=0)
            b_emitted = tl.load(history + then + o_a, mask=m_tried, other=0)
            wrong = tl.min(tl.where(m_tried & (b_draft != b_emitted), o_a, LONGEST), 0)
            p_count = counts + tl.minimum(match + o_a, LONGEST)
            tl.atomic_add(p_count, 1, mask=m_tried & (o_a <= wrong))
            tl.atomic_add(p_count + LONGEST + 1, 1, mask=m_tried & (o_a < wrong))
        first = i_b * BLOCK
        if first < length:
            o_n = first + tl.arange(0, BLOCK)
            # o_n is the position of the match's last token
            m_alive = o_n < length - 1
            b_match = tl.zeros([BLOCK], tl.int32)
            back = tl.full([], 0, tl.int32)
            while (back < LONGEST) & (tl.max(m_alive.to(tl.int32), 0) > 0):
                wanted = tl.load(history + length - 1 - back)
                m_alive = m_alive & (o_n >= back)
                b_token = tl.load(history + o_n - back, mask=m_alive, other=0)
                m_alive = m_alive & (b_token == wanted)
                b_match += m_alive.to(tl.int32)
                back += 1
            b_key = (b_match.to(tl.int64) << 32) | (o_n + 1).to(tl.int64)
            key = tl.max(tl.where(b_match >= SHORTEST, b_key, 0), 0)
            if key > 0:
                tl.atomic_max(found + slot, key)


@dataclass(slots=True)
class FindNgram(Op):
    """Find every request's n-gram draft, and count how the last one did; see the module."""

    history: Annotated[Tensor, "[S, MOST] int32"]  # the tokens of each slot's request
    lengths: Annotated[Tensor, "[S] int32"]  # number of tokens
    slots: Annotated[Tensor, "[R] int64"]  # request slot of each row, or -1
    last: Annotated[Tensor, "[S, 3] int32"]  # p, m and n of the last draft; m is 0 without one
    # Trials and successes by match length; added to.
    counts: Annotated[Tensor, "[2, 33] int32"]
    # 0 for the slots of active rows; written: m << 32 | p, 0 for no match.
    found: Annotated[Tensor, "[S] int64"]

    def triton(self) -> None:
        self.launch(
            _find_kernel,
            self.slots.shape[0],
            cdiv(self.history.shape[1], _BLOCK),
            BLOCK=_BLOCK,
            SHORTEST=SHORTEST,
            LONGEST=LONGEST,
            num_warps=8,
        )


find_ngram = public(FindNgram, cpu="bastion_kernels.cpu.ngram")
