# SPDX-License-Identifier: Apache-2.0
"""Lookup: every place of a text compared with its end, and the copy in the drafter's lattice."""

from __future__ import annotations

import torch

from bastion_kernels.draft.find_ngram import LONGEST, SHORTEST, FindNgram
from bastion_kernels.draft.mix_ngram import MixNgram, ngram_chances
from tests.references.declare import of


def longest_match(text: list[int]) -> tuple[int, int]:
    """m and p, by comparing every place with the end; zeros for none."""
    best = 0, 0
    for place in range(SHORTEST, len(text)):
        match = 0
        while match < min(place, LONGEST) and text[place - 1 - match] == text[-1 - match]:
            match += 1
        if match >= SHORTEST:
            best = max(best, (match, place))
    return best


@of(FindNgram)
def find_ngram(op: FindNgram) -> None:
    for slot in op.slots.tolist():
        if slot < 0:
            continue
        text = op.history[slot, : int(op.lengths[slot])].tolist()
        start, match, then = op.last[slot].tolist()
        if match:
            emitted = text[then : then + LONGEST]
            for ahead, (copied, token) in enumerate(zip(text[start:], emitted)):
                length = min(match + ahead, LONGEST)
                op.counts[0, length] += 1
                if copied != token:
                    break
                op.counts[1, length] += 1
        match, place = longest_match(text)
        op.found[slot] = match << 32 | place


@of(MixNgram)
def mix_ngram(op: MixNgram) -> None:
    """Depth by depth, in double precision."""
    _, depths, width = op.candidates.shape
    chances = ngram_chances(op.counts, op.priors.double())
    for r, slot in enumerate(op.slots.tolist()):
        if slot < 0:
            continue
        match, start = int(op.found[slot]) >> 32, int(op.found[slot]) & 0xFFFFFFFF
        text = op.history[slot, : int(op.lengths[slot])].tolist()
        op.found[slot] = 0
        op.last[slot] = torch.tensor([start, match, len(text)])
        op.tokens[r], op.places[r] = -1, -1
        state, path, expected = 0, 1.0, 0.0
        for depth in range(op.tokens.shape[1] if match else 0):
            text.append(text[start + depth])
            chance = float(chances[min(match + depth, LONGEST)])
            path *= chance
            expected += path
            mixed, here = torch.zeros(width + 1, dtype=torch.float64), width
            if depth < depths:
                tokens = op.candidates[r, depth].tolist()
                here = tokens.index(text[-1]) if text[-1] in tokens else width
                if state >= 0:
                    own = op.logprobs[r, depth, state].double().clamp(max=0.0).exp()
                    mixed[:width] = (1.0 - chance) * own.nan_to_num(0.0)
            mixed[here] += chance
            op.tokens[r, depth], op.places[r, depth] = text[-1], here
            op.ngram_rows[r, depth] = mixed.log()
            if not op.stateless:
                state = here if here < width else -1
        op.expected[slot] = expected
    full = op.counts[0] > 1024
    op.counts[:, full] = op.counts[:, full] // 2
