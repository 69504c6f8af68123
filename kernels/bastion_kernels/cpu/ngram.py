# SPDX-License-Identifier: Apache-2.0
"""Lookup on a CPU: `find_ngram` and `mix_ngram`."""

from __future__ import annotations

import math

import numpy as np

from bastion_kernels.cpu.cache import native, njit
from bastion_kernels.draft.find_ngram import LONGEST, SHORTEST
from bastion_kernels.draft.mix_ngram import _MOST_TRIALS, _PRIOR_TRIALS

_LONGEST, _SHORTEST, _TRIALS, _MOST = LONGEST, SHORTEST, _PRIOR_TRIALS, _MOST_TRIALS
_BLOCK = 256  # tokens compared with the last one at a time


@njit
def _any_equal(text, begin, end, token):
    """Whether a token occurs in text[begin:end]; branch-free, so that it is vectorised."""
    count = np.int32(0)
    for i in range(begin, end):
        count += np.int32(text[i] == token)
    return count > 0


@njit
def _find_in(text, size):
    """m << 32 | p of text[:size]; 0 for no match. The latest places come first."""
    longest, place = _SHORTEST - 1, 0
    last = text[size - 1]
    end = size - 1
    while end > 0 and longest < _LONGEST:
        begin = max(end - _BLOCK, 0)
        if _any_equal(text, begin, end, last):
            for i in range(end - 1, begin - 1, -1):
                # a match longer than the best one also matches at its first token
                if text[i] != last or i < longest or text[i - longest] != text[size - 1 - longest]:
                    continue
                match = 1
                while match < _LONGEST and i >= match and text[i - match] == text[size - 1 - match]:
                    match += 1
                if match > longest:
                    longest, place = match, i + 1
                    if longest == _LONGEST:
                        break
        end = begin
    return (np.int64(longest) << 32) | place if place > 0 else np.int64(0)


@native
def find_ngram(history, lengths, slots, last, counts, found):
    """Search backwards from the end, until no match can be longer."""
    for row in range(slots.shape[0]):
        slot = slots[row]
        if slot < 0:
            continue
        text, size = history[slot], lengths[slot]
        start, match, then = last[slot, 0], last[slot, 1], last[slot, 2]
        if match > 0:
            for ahead in range(min(size - then, _LONGEST)):
                length = min(match + ahead, _LONGEST)
                counts[0, length] += 1
                if text[start + ahead] != text[then + ahead]:
                    break
                counts[1, length] += 1
        found[slot] = _find_in(text, size) if size > _SHORTEST else 0


@native
def mix_ngram(
    history, lengths, slots, found, last, counts, priors, candidates, logprobs, stateless,
    tokens, places, ngram_rows, expected,
):  # fmt: skip
    depths, width = candidates.shape[1], candidates.shape[2]
    for r in range(slots.shape[0]):
        slot = slots[r]
        if slot < 0:
            continue
        match, start = found[slot] >> 32, found[slot] & 0xFFFFFFFF
        size = lengths[slot]
        found[slot] = 0
        last[slot, 0], last[slot, 1], last[slot, 2] = start, match, size
        tokens[r], places[r] = -1, -1
        state, path, total = 0, 1.0, 0.0
        for depth in range(tokens.shape[1] if match > 0 else 0):
            at = min(match + depth, _LONGEST)
            chance = (counts[1, at] + _TRIALS * priors[at]) / (counts[0, at] + _TRIALS)
            path *= chance
            total += path
            token = history[slot, start + depth % (size - start)]
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
