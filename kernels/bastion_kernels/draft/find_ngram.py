# SPDX-License-Identifier: Apache-2.0
"""Prompt lookup: find an earlier occurrence of the end of a request's text.

In the history h of n tokens (prompt and reply), a position p < n matches with

    m = tokens before p that equal the last tokens of h        (at least 2, counted up to 32)

and so does a position of the ring (see `ngram_table`) after tokens of the request's group. The
n-gram draft c_1, c_2, ... is the text that follows. At the end of the history, or of a reply in the
ring, it continues with itself, so repetitions of any period continue.

A lookup adds the n-grams of the tokens since the previous one to the table, and `add_prompt` those
of the prompt, so its time does not depend on n. It compares the table's positions for the last
tokens of h, and the position behind the previous draft, with the end of h token by token. The
largest m wins, then the request's own text, then the latest p, all packed into one integer.

The success rate is learned from the emitted tokens, whether or not a draft was verified. When the
history has grown from n to n' tokens, the draft found at n has been tried at match lengths m,
m + 1, ..., up to its first wrong token or to n'. `counts` has trials and successes by match length,
in own text and then in others'; integer sums do not depend on the order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from bastion_kernels.draft.ngram_table import (
    _BASE,
    _LENGTHS,
    _LONGEST,
    _PLACE_BITS,
    _WORD,
    PLACE_BITS,
    SHORTEST,
    add_places,
    entry_of,
)
from bastion_kernels.op import Op, cdiv, padded, public
from bastion_kernels.triton_or_none import tl, triton

_BLOCK, _MOST_PROGRAMS = 64, 16
_SHORTEST, _PLACE = tl.constexpr(SHORTEST), tl.constexpr((1 << PLACE_BITS) - 1)


@triton.jit
def _insert_kernel(
    history,
    lengths,
    slots,
    last,
    table,
    clock,
    E,
    stride_history_s,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (R, PROGRAMS). Add the positions since the previous lookup."""
    i_r = tl.program_id(0)
    slot = tl.load(slots + i_r)
    if slot >= 0:
        text = history + slot * stride_history_s
        length = tl.load(lengths + slot)
        number = tl.load(clock) << _PLACE_BITS
        first = tl.load(last + 3 * slot + 2) + tl.program_id(1) * BLOCK
        for i_p in range(first, length, PROGRAMS * BLOCK):
            o_p = i_p + tl.arange(0, BLOCK)
            add_places(text, o_p, 0, length, slot, number | o_p, table, E, BLOCK)


@triton.jit
def _matches(b_token, b_end, b_place, OWN: tl.constexpr):
    """The largest m << 33 | OWN << 32 | p of the places p. b_token: the tokens before each."""
    o_b = tl.arange(0, _LONGEST)
    b_match = tl.min(tl.where(b_token == b_end[None, :], _LONGEST, o_b[None, :]), 1)
    b_key = (b_match.to(tl.int64) << 33) | (OWN << 32) | b_place
    return tl.max(tl.where(b_match >= _SHORTEST, b_key, 0), 0)


@triton.jit
def _find_kernel(
    history,
    lengths,
    slots,
    last,
    counts,
    groups,
    ring,
    ring_groups,
    table,
    clock,
    found,
    drafts,
    Q,
    E,
    stride_history_s,
    stride_drafts_s,
    W: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Grid: (R,). Lane i looks up the n-gram of i + 1 tokens; lane 0 continues the last draft."""
    i_r = tl.program_id(0)
    if i_r == 0:
        tl.store(clock, tl.load(clock) + 1)
    slot = tl.load(slots + i_r)
    if slot >= 0:
        history += slot * stride_history_s
        drafts += slot * stride_drafts_s
        length = tl.load(lengths + slot)
        start = tl.load(last + 3 * slot).to(tl.int64)
        code = tl.load(last + 3 * slot + 1)
        then = tl.load(last + 3 * slot + 2)
        match, own = code >> 1, code & 1
        o_w = tl.arange(0, BLOCK_W)
        m_tried = (match > 0) & (o_w < tl.minimum(length - then, W))
        b_draft = tl.load(drafts + o_w, mask=m_tried, other=0)
        b_emitted = tl.load(history + then + o_w, mask=m_tried, other=0)
        wrong = tl.min(tl.where(m_tried & (b_draft != b_emitted), o_w, BLOCK_W), 0)
        p_count = counts + (1 - own) * (_LONGEST + 1) + tl.minimum(match + o_w, _LONGEST)
        tl.atomic_add(p_count, 1, mask=m_tried & (o_w <= wrong))
        tl.atomic_add(p_count + 2 * (_LONGEST + 1), 1, mask=m_tried & (o_w < wrong))
        o_l = tl.arange(0, _LONGEST)
        b_hash = tl.zeros([_LONGEST], tl.int64)
        for back in tl.static_range(_LONGEST):
            token = tl.load(history + length - 1 - back, mask=length > back, other=0)
            b_hash = tl.where(o_l >= back, (b_hash * _BASE + token + 1) & _WORD, b_hash)
        b_bit = tl.full([_LONGEST], 1, tl.int64) << o_l
        m_l = ((b_bit & _LENGTHS) != 0) & (o_l < length)
        o_b = tl.arange(0, _LONGEST)
        b_end = tl.load(history + length - 1 - o_b, mask=o_b < length, other=-2)
        behind = start + length - then
        b_place = tl.load(table + entry_of(b_hash, slot, E), mask=m_l, other=0) & _PLACE
        b_place = tl.where(o_l == 0, tl.where((match > 0) & (own == 1), behind, 0), b_place)
        b_place = tl.where(b_place < length, b_place, 0)
        m_b = o_b[None, :] < b_place[:, None]
        b_token = tl.load(history + b_place[:, None] - 1 - o_b[None, :], mask=m_b, other=-1)
        key = _matches(b_token, b_end, b_place, 1)
        group = tl.load(groups + slot)
        if group != 0:
            b_entry = tl.load(table + entry_of(b_hash, group, E), mask=m_l, other=0)
            b_place = tl.where(o_l == 0, behind % Q, b_entry & _PLACE)
            m_l = tl.where(o_l == 0, (match > 0) & (own == 0), b_entry != 0) & (b_place < Q)
            m_l = m_l & (tl.load(ring_groups + b_place, mask=m_l, other=0) == group)
            b_at = (b_place[:, None] + Q - 1 - o_b[None, :]) % Q
            m_b = m_l[:, None] & (o_b[None, :] < Q)
            m_b = m_b & (tl.load(ring_groups + b_at, mask=m_b, other=0) == group)
            b_token = tl.load(ring + b_at, mask=m_b, other=-1)
            key = tl.maximum(key, _matches(b_token, b_end, b_place, 0))
        tl.store(found + slot, key)
        tl.debug_barrier()  # the last draft has been read
        place = key & 0xFFFFFFFF
        m_w = o_w < W
        if ((key >> 32) & 1) != 0:
            b_draft = tl.load(history + place + o_w % (length - place), mask=m_w, other=0)
            tl.store(drafts + o_w, b_draft, mask=m_w)
        elif key > 0:
            m_there = tl.load(ring_groups + (place + o_w) % Q, mask=m_w, other=0) == group
            size = tl.min(tl.where(m_there, W, o_w), 0)
            b_draft = tl.load(ring + (place + o_w % size) % Q, mask=m_w, other=0)
            tl.store(drafts + o_w, b_draft, mask=m_w)


@dataclass(slots=True)
class FindNgram(Op):
    """Find every request's n-gram draft, and count how the last one did; see the module."""

    history: Annotated[Tensor, "[S, MOST] int32"]  # the tokens of each slot's request
    lengths: Annotated[Tensor, "[S] int32"]  # number of tokens
    slots: Annotated[Tensor, "[R] int64"]  # request slot of each row, or -1
    # Of the last draft: p; m << 1 | whether it is own text, 0 without one; n. For a new request
    # 0, 0 and its prompt's n.
    last: Annotated[Tensor, "[S, 3] int32"]
    # Trials and successes by match length, in own text and in others'; added to.
    counts: Annotated[Tensor, "[2, 66] int32"]
    groups: Annotated[Tensor, "[S] int64"]  # whose replies a request may see; 0 for none
    ring: Annotated[Tensor, "[Q] int32"]  # of `keep_replies`
    ring_groups: Annotated[Tensor, "[Q] int64"]  # of `keep_replies`
    table: Annotated[Tensor, "[E] int64"]  # of `ngram_table`; entries are added
    clock: Annotated[Tensor, "[1] int64"]  # number of the lookup, from 1; counts up
    found: Annotated[Tensor, "[S] int64"]  # written: m << 33 | own text << 32 | p, 0 for no match
    drafts: Annotated[Tensor, "[S, W] int32"]  # written for rows with a match

    def check(self) -> None:
        self.check_declared()
        if self.table.shape[0] & (self.table.shape[0] - 1):
            raise ValueError(f"{self.name}: table must have a power of two of entries")
        if self.history.shape[1] > 1 << PLACE_BITS:
            raise ValueError(f"{self.name}: history has more than 2**{PLACE_BITS} tokens")

    def triton(self) -> None:
        rows = self.slots.shape[0]
        programs = min(cdiv(self.history.shape[1], _BLOCK), _MOST_PROGRAMS)
        self.launch(_insert_kernel, rows, programs, PROGRAMS=programs, BLOCK=_BLOCK, num_warps=2)
        self.launch(_find_kernel, rows, BLOCK_W=padded(self.drafts.shape[1], 32), num_warps=1)


find_ngram = public(FindNgram, cpu="bastion_kernels.cpu.ngram")
