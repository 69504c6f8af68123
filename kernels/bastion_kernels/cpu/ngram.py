# SPDX-License-Identifier: Apache-2.0
"""N-gram lookup on a CPU: `find_ngram`, `add_prompt`, `keep_replies` and `mix_ngram`."""

from __future__ import annotations

import math

import numpy as np

from bastion_kernels.cpu.cache import native, njit
from bastion_kernels.draft import ngram_table as _table
from bastion_kernels.draft.mix_ngram import _MOST_TRIALS, _PRIOR_TRIALS

_TRIALS, _MOST = _PRIOR_TRIALS, _MOST_TRIALS
_SHORTEST, _LONGEST, _PLACE_BITS = _table.SHORTEST, _table.LONGEST, _table.PLACE_BITS
_WORD, _BASE, _MIX_1, _MIX_2 = _table.WORD, _table.BASE, _table.MIX_1, _table.MIX_2
_OWNER, _OWNER_FACTOR = _table.OWNER, _table.OWNER_FACTOR
_IS_LENGTH = np.isin(np.arange(_LONGEST + 1), _table.LENGTHS)


@njit
def _entry_of(key, owner, entries):
    key = (key + ((owner & _OWNER) + 1) * _OWNER_FACTOR) & _WORD
    key = ((key ^ (key >> 16)) * _MIX_1) & _WORD
    key = ((key ^ (key >> 15)) * _MIX_2) & _WORD
    return (key ^ (key >> 15)) & (entries - 1)


@njit
def _add(text, begin, place, owner, value, table):
    """Add the n-grams of text[begin:] before a place."""
    key = np.int64(0)
    for back in range(min(place - begin, _LONGEST)):
        key = (key * _BASE + text[place - 1 - back] + 1) & _WORD
        if _IS_LENGTH[back + 1]:
            entry = _entry_of(key, owner, table.shape[0])
            table[entry] = max(table[entry], value)


@njit
def _own_match(text, size, place):
    """m << 33 | 1 << 32 | p of p = place; 0 for no match."""
    match = 0
    while match < min(place, _LONGEST) and text[place - 1 - match] == text[size - 1 - match]:
        match += 1
    return (np.int64(2 * match + 1) << 32) | place if match >= _SHORTEST else np.int64(0)


@njit
def _ring_match(text, size, group, ring, ring_groups, place):
    """m << 33 | p of p = place; 0 for no match."""
    match, whole = 0, ring.shape[0]
    if place >= whole or ring_groups[place] != group:
        return np.int64(0)
    while match < min(size, _LONGEST, whole):
        at = (place + whole - 1 - match) % whole
        if ring_groups[at] != group or ring[at] != text[size - 1 - match]:
            break
        match += 1
    return (np.int64(2 * match) << 32) | place if match >= _SHORTEST else np.int64(0)


@njit
def _judge(text, size, draft, code, then, counts):
    first = 0 if code & 1 else _LONGEST + 1
    for ahead in range(min(size - then, draft.shape[0])):
        at = first + min((code >> 1) + ahead, _LONGEST)
        counts[0, at] += 1
        if draft[ahead] != text[then + ahead]:
            break
        counts[1, at] += 1


@njit
def _best_match(text, size, slot, last, group, ring, ring_groups, table):
    """The largest of the candidates' matches."""
    start, code, then = last[0], last[1], last[2]
    behind, best, key = start + size - then, np.int64(0), np.int64(0)
    if code & 1:
        best = _own_match(text, size, behind)
    elif code > 0 and group != 0:
        best = _ring_match(text, size, group, ring, ring_groups, behind % ring.shape[0])
    for back in range(min(size, _LONGEST)):
        key = (key * _BASE + text[size - 1 - back] + 1) & _WORD
        if not _IS_LENGTH[back + 1]:
            continue
        place = table[_entry_of(key, slot, table.shape[0])] & ((1 << _PLACE_BITS) - 1)
        if place < size:
            best = max(best, _own_match(text, size, place))
        entry = table[_entry_of(key, group, table.shape[0])] if group != 0 else np.int64(0)
        if entry != 0:
            place = entry & ((1 << _PLACE_BITS) - 1)
            best = max(best, _ring_match(text, size, group, ring, ring_groups, place))
    return best


@njit
def _continue(text, size, group, ring, ring_groups, best, draft):
    place, whole = best & 0xFFFFFFFF, ring.shape[0]
    if (best >> 32) & 1:
        for ahead in range(draft.shape[0]):
            draft[ahead] = text[place + ahead % (size - place)]
    elif best > 0:
        count = 1
        while count < draft.shape[0] and ring_groups[(place + count) % whole] == group:
            count += 1
        for ahead in range(draft.shape[0]):
            draft[ahead] = ring[(place + ahead % count) % whole]


@native
def find_ngram(
    history, lengths, slots, last, counts, groups, ring, ring_groups, table, clock, found, drafts
):
    """As on a GPU, every request's new tokens are added before the first lookup."""
    number = clock[0] << _PLACE_BITS
    for slot in slots:
        if slot >= 0:
            for place in range(last[slot, 2], lengths[slot]):
                _add(history[slot], 0, place, slot, number | place, table)
    clock[0] += 1
    for slot in slots:
        if slot < 0:
            continue
        text, size, group, before = history[slot], lengths[slot], groups[slot], last[slot]
        if before[1] > 0:
            _judge(text, size, drafts[slot], before[1], before[2], counts)
        best = _best_match(text, size, slot, before, group, ring, ring_groups, table)
        _continue(text, size, group, ring, ring_groups, best, drafts[slot])
        found[slot] = best


@native
def add_prompt(history, slots, numbers, table, begin, end):
    for slot in slots:
        for place in range(begin, end):
            value = numbers[slot] << _PLACE_BITS | place
            _add(history[slot], 0, place, slot, value, table)


@native
def keep_replies(history, lengths, begins, groups, slots, ring, ring_groups, head, table, clock):
    number, whole, at = clock[0] << _PLACE_BITS, ring.shape[0], head[0]
    for slot in slots:
        text, size, group = history[slot], lengths[slot], groups[slot]
        begin = max(begins[slot], size - whole + 1)
        if group == 0 or begin >= size:
            continue
        for place in range(begin, size):
            ring[at], ring_groups[at] = text[place], group
            _add(text, begin, place, group, number | at, table)
            at = (at + 1) % whole
        ring[at], ring_groups[at] = -1, 0
        at = (at + 1) % whole
    head[0] = at


@native
def mix_ngram(
    drafts, lengths, slots, found, last, counts, priors, candidates, logprobs, stateless,
    tokens, places, ngram_rows, expected,
):  # fmt: skip
    depths, width = candidates.shape[1], candidates.shape[2]
    for r in range(slots.shape[0]):
        slot = slots[r]
        if slot < 0:
            continue
        code, start = found[slot] >> 32, found[slot] & 0xFFFFFFFF
        match, first = code >> 1, 0 if code & 1 else _LONGEST + 1
        last[slot, 0], last[slot, 1], last[slot, 2] = start, code, lengths[slot]
        tokens[r], places[r] = -1, -1
        state, path, total = 0, 1.0, 0.0
        for depth in range(tokens.shape[1] if match > 0 else 0):
            at = first + min(match + depth, _LONGEST)
            chance = (counts[1, at] + _TRIALS * priors[at]) / (counts[0, at] + _TRIALS)
            path *= chance
            total += path
            token = drafts[slot, depth]
            here = width
            log_rest = math.log1p(-chance)
            if depth < depths:
                for i in range(width):
                    if candidates[r, depth, i] == token:
                        here = i
                        break
            for i in range(width):
                ngram_rows[r, depth, i] = -np.inf
                if depth < depths and state >= 0:
                    logprob = min(logprobs[r, depth, state, i], np.float32(0.0))
                    if logprob == logprob:
                        ngram_rows[r, depth, i] = logprob + log_rest
            ngram_rows[r, depth, width] = -np.inf
            own = math.exp(np.float64(ngram_rows[r, depth, here]))
            ngram_rows[r, depth, here] = math.log(own + chance)
            tokens[r, depth], places[r, depth] = token, here
            if not stateless:
                state = here if here < width else -1
        expected[slot] = total
    for at in range(counts.shape[1]):
        if counts[0, at] > _MOST:
            counts[0, at] //= 2
            counts[1, at] //= 2
