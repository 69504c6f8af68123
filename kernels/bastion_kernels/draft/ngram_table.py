# SPDX-License-Identifier: Apache-2.0
"""A hash table of n-grams, and the ring of ended replies, whose n-grams it also has.

For each n-gram of `LENGTHS` tokens of a request's text the table has the latest position behind it.
An entry has a clock, which counts lookups and requests, in the bits above the position. The larger
of two entries stays, whatever the order of writes, so all ranks have the same table. A collision,
or an entry whose text is gone, costs a draft at most, because readers compare tokens.

The ring has the last replies of requests that have ended, each followed by a separator of group 0.
Their n-grams are hashed with their group, and a token of another group never matches, so a request
finds replies of its own group only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from bastion_kernels.op import Op, cdiv, padded, public
from bastion_kernels.triton_or_none import tl, triton

# tokens of the n-grams in the table
LENGTHS = (2, 4, 8, 16, 32)
# shortest match, and the length from which all matches are treated alike
SHORTEST, LONGEST = LENGTHS[0], LENGTHS[-1]
# bits of a position in an entry
PLACE_BITS = 24
# Hashes have 32 bits, so that products fit 64: their mask, factors of tokens and owner, final mix.
WORD, BASE, OWNER_FACTOR, MIX_1, MIX_2 = 2**32 - 1, 0x5BD1E995, 0x165667B1, 0x2C1B3C6D, 0x297A2D39
OWNER = 2**30 - 1
# With the longest texts a sixteenth of the table is in use, unless it would exceed 128 MiB.
_PER_TOKEN, _MOST_ENTRIES = 16 * len(LENGTHS), 2**24
_BLOCK = 256
# for the kernels
_WORD, _BASE, _OWNER_FACTOR = tl.constexpr(WORD), tl.constexpr(BASE), tl.constexpr(OWNER_FACTOR)
_MIX_1, _MIX_2, _OWNER = tl.constexpr(MIX_1), tl.constexpr(MIX_2), tl.constexpr(OWNER)
_LONGEST, _PLACE_BITS = tl.constexpr(LONGEST), tl.constexpr(PLACE_BITS)
_LENGTHS = tl.constexpr(sum(1 << (length - 1) for length in LENGTHS))  # bit m - 1 for m tokens


def ngram_table(tokens: int, device: torch.device) -> Tensor:
    """`[E]` int64: an empty table for texts of so many tokens."""
    entries = min(padded(_PER_TOKEN * tokens), _MOST_ENTRIES)
    return torch.zeros(entries, dtype=torch.int64, device=device)


@triton.jit
def entry_of(b_hash, owner, E):
    """Entries of the n-grams with these hashes. owner: a request's slot, or a group."""
    b_hash = (b_hash + ((owner & _OWNER) + 1) * _OWNER_FACTOR) & _WORD
    b_hash = ((b_hash ^ (b_hash >> 16)) * _MIX_1) & _WORD
    b_hash = ((b_hash ^ (b_hash >> 15)) * _MIX_2) & _WORD
    return (b_hash ^ (b_hash >> 15)) & (E - 1)


@triton.jit
def add_places(text, o_p, begin, end, owner, b_value, table, E, BLOCK: tl.constexpr):
    """Add the n-grams before the places o_p of text[begin:end] with entries b_value."""
    b_hash = tl.zeros([BLOCK], tl.int64)
    for back in tl.static_range(_LONGEST):
        m_p = (o_p < end) & (o_p > begin + back)
        b_token = tl.load(text + o_p - 1 - back, mask=m_p, other=0)
        b_hash = (b_hash * _BASE + b_token + 1) & _WORD
        if (_LENGTHS >> back) & 1:
            tl.atomic_max(table + entry_of(b_hash, owner, E), b_value, mask=m_p, sem="relaxed")


# `slots` is a slice that starts at any slot: variants by alignment would be compiled while serving.
@triton.jit(do_not_specialize=["begin", "end"], do_not_specialize_on_alignment=["slots"])
def _prompt_kernel(
    history, slots, numbers, table, begin, end, E, stride_history_s, BLOCK: tl.constexpr
):
    """Grid: (R, cdiv(end - begin, BLOCK))."""
    slot = tl.load(slots + tl.program_id(0))
    o_p = begin + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b_value = (tl.load(numbers + slot) << _PLACE_BITS) | o_p
    add_places(history + slot * stride_history_s, o_p, 0, end, slot, b_value, table, E, BLOCK)


@triton.jit(do_not_specialize=["R"], do_not_specialize_on_alignment=["slots"])
def _keep_kernel(
    history,
    lengths,
    begins,
    groups,
    slots,
    ring,
    ring_groups,
    head,
    table,
    clock,
    R,
    Q,
    E,
    stride_history_s,
    BLOCK: tl.constexpr,
):
    """Grid: (1,), because each reply begins where the one before it ends."""
    at = tl.load(head)
    number = tl.load(clock) << _PLACE_BITS
    for i_r in range(R):
        slot = tl.load(slots + i_r)
        group = tl.load(groups + slot)
        length = tl.load(lengths + slot).to(tl.int64)
        begin = tl.maximum(tl.load(begins + slot).to(tl.int64), length - Q + 1)
        if (group != 0) & (begin < length):
            text = history + slot * stride_history_s
            for i_p in range(begin, length + 1, BLOCK):
                o_p = i_p + tl.arange(0, BLOCK)
                m_p, b_to = o_p <= length, (at + o_p - begin) % Q
                b_token = tl.load(text + o_p, mask=o_p < length, other=-1)
                tl.store(ring + b_to, b_token, mask=m_p)
                tl.store(ring_groups + b_to, tl.where(o_p < length, group, 0), mask=m_p)
                add_places(text, o_p, begin, length, group, number | b_to, table, E, BLOCK)
            at = (at + length - begin + 1) % Q
    tl.store(head, at)


@dataclass(slots=True)
class KeepReplies(Op):
    """Append the replies of requests that have ended to the ring, with their n-grams."""

    history: Annotated[Tensor, "[S, MOST] int32"]  # the tokens of each slot's request
    lengths: Annotated[Tensor, "[S] int32"]  # number of tokens
    begins: Annotated[Tensor, "[S] int32"]  # where the reply begins
    groups: Annotated[Tensor, "[S] int64"]  # group of each slot's request, 0 for none
    slots: Annotated[Tensor, "[R] int64"]  # those that have ended
    ring: Annotated[Tensor, "[Q] int32"]  # written
    ring_groups: Annotated[Tensor, "[Q] int64"]  # written: group of each token
    head: Annotated[Tensor, "[1] int64"]  # where the next reply begins
    table: Annotated[Tensor, "[E] int64"]  # of `ngram_table`; entries are added
    clock: Annotated[Tensor, "[1] int64"]  # number of the next lookup

    def check(self) -> None:
        self.check_declared()
        if self.ring.shape[0] > 1 << PLACE_BITS:
            raise ValueError(f"{self.name}: ring has more than 2**{PLACE_BITS} tokens")

    def triton(self) -> None:
        self.launch(_keep_kernel, 1, BLOCK=_BLOCK, num_warps=4)


@dataclass(slots=True)
class AddPrompt(Op):
    """Add a part of the n-grams of new requests' prompts, in any order of the parts."""

    history: Annotated[Tensor, "[S, MOST] int32"]  # the tokens of each slot's request
    slots: Annotated[Tensor, "[R] int64"]  # the new requests
    numbers: Annotated[Tensor, "[S] int64"]  # `clock` when each slot's request came
    table: Annotated[Tensor, "[E] int64"]  # of `ngram_table`; entries are added
    begin: int  # first position
    end: int  # behind the last one

    def triton(self) -> None:
        rows, parts = self.slots.shape[0], cdiv(self.end - self.begin, _BLOCK)
        self.launch(_prompt_kernel, rows, parts, BLOCK=_BLOCK, num_warps=4)


add_prompt = public(AddPrompt, cpu="bastion_kernels.cpu.ngram")
keep_replies = public(KeepReplies, cpu="bastion_kernels.cpu.ngram")
