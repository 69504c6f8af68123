# SPDX-License-Identifier: Apache-2.0
"""Lookup: every place of a text compared with its end, and the copy in the drafter's lattice."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bastion_kernels.draft.find_ngram import FindNgram
from bastion_kernels.draft.mix_ngram import MixNgram, ngram_chances
from bastion_kernels.draft.ngram_table import (
    LENGTHS,
    LONGEST,
    SHORTEST,
    AddPrompt,
    KeepReplies,
)
from tests.references.declare import of


def matched(text: Sequence[int], before: Sequence[int]) -> int:
    """Tokens at the end of `before` that equal the text's last ones; 0 if they are too few."""
    match, most = 0, min(len(text), len(before), LONGEST)
    while match < most and before[-1 - match] == text[-1 - match]:
        match += 1
    return match if match >= SHORTEST else 0


def latest(
    matches: Sequence[int], lengths: Sequence[int] = LENGTHS, behind: int = -1
) -> tuple[int, int]:
    """m and p of the best of these places: for each length the latest that matches, and `behind`.

    matches: m by place. Zeros if there is none.
    """
    best = (matches[behind], behind) if behind >= 0 and matches[behind] else (0, 0)
    for length in lengths:
        place = max((p for p, match in enumerate(matches) if match >= length), default=-1)
        if place >= 0:
            best = max(best, (matches[place], place))
    return best


def best_match(
    text: list[int], lengths: Sequence[int] = LENGTHS, behind: int = -1, begin: int = 0
) -> tuple[int, int]:
    """m and p in a text; of all `lengths`, the longest match, the latest of them.

    begin: the first place that is looked at, except for `behind`.
    """
    matches = [matched(text, text[max(p - LONGEST, 0) : p]) for p in range(len(text))]
    matches[:begin] = [match * (p == behind) for p, match in enumerate(matches[:begin])]
    return latest(matches, lengths, behind)


def ring_matches(text: list[int], group: int, ring: list[int], groups: list[int]) -> list[int]:
    """m of every place of the ring: after tokens of the group, and in front of one."""
    matches = []
    for place in range(len(ring)):
        before: list[int] = []
        while len(before) < min(LONGEST, len(ring)) and groups[place - 1 - len(before)] == group:
            before.insert(0, ring[place - 1 - len(before)])
        matches.append(matched(text, before) if groups[place] == group else 0)
    return matches


@of(FindNgram)
def find_ngram(op: FindNgram) -> None:
    ring, groups = op.ring.tolist(), op.ring_groups.tolist()
    for slot in op.slots.tolist():
        if slot < 0:
            continue
        text = op.history[slot, : int(op.lengths[slot])].tolist()
        start, code, then = op.last[slot].tolist()
        match, own, draft = code >> 1, code & 1, op.drafts[slot].tolist()
        for ahead, (copied, token) in enumerate(zip(draft, text[then:])):
            if not match:
                break
            at = min(match + ahead, LONGEST) + (0 if own else LONGEST + 1)
            op.counts[0, at] += 1
            if copied != token:
                break
            op.counts[1, at] += 1
        behind = start + len(text) - then
        found, place = best_match(text, behind=behind if match and own else -1)
        key, rest = found << 33 | (found > 0) << 32 | place, text[place:]
        group = int(op.groups[slot])
        if group:
            matches = ring_matches(text, group, ring, groups)
            other, at = latest(matches, behind=behind % len(ring) if match and not own else -1)
            if other > found:
                key, rest = other << 33 | at, []
                while groups[at] == group and len(rest) < len(draft):
                    rest.append(ring[at])
                    at = (at + 1) % len(ring)
        op.found[slot] = key
        if key:
            many = rest * len(draft)
            op.drafts[slot] = torch.tensor(many[: len(draft)])


@of(AddPrompt)
def add_prompt(op: AddPrompt) -> None:
    """Nothing: `find_ngram` compares every place."""


@of(KeepReplies)
def keep_replies(op: KeepReplies) -> None:
    size, head = len(op.ring), int(op.head)
    for slot in op.slots.tolist():
        reply = op.history[slot, int(op.begins[slot]) : int(op.lengths[slot])].tolist()
        reply = reply[-(size - 1) :]
        if not reply or not op.groups[slot]:
            continue
        for token in reply:
            op.ring[head], op.ring_groups[head] = token, op.groups[slot]
            head = (head + 1) % size
        op.ring[head], op.ring_groups[head] = -1, 0
        head = (head + 1) % size
    op.head[0] = head


@of(MixNgram)
def mix_ngram(op: MixNgram) -> None:
    """Depth by depth, in double precision."""
    _, depths, width = op.candidates.shape
    chances = ngram_chances(op.counts, op.priors.double())
    for r, slot in enumerate(op.slots.tolist()):
        if slot < 0:
            continue
        code, start = int(op.found[slot]) >> 32, int(op.found[slot]) & 0xFFFFFFFF
        match, first = code >> 1, 0 if code & 1 else LONGEST + 1
        op.last[slot] = torch.tensor([start, code, int(op.lengths[slot])])
        op.tokens[r], op.places[r] = -1, -1
        state, path, expected = 0, 1.0, 0.0
        for depth in range(op.tokens.shape[1] if match else 0):
            token = int(op.drafts[slot, depth])
            chance = float(chances[first + min(match + depth, LONGEST)])
            path *= chance
            expected += path
            mixed, here = torch.zeros(width + 1, dtype=torch.float64), width
            if depth < depths:
                tokens = op.candidates[r, depth].tolist()
                here = tokens.index(token) if token in tokens else width
                if state >= 0:
                    own = op.logprobs[r, depth, state].double().clamp(max=0.0).exp()
                    mixed[:width] = (1.0 - chance) * own.nan_to_num(0.0)
            mixed[here] += chance
            op.tokens[r, depth], op.places[r, depth] = token, here
            op.ngram_rows[r, depth] = mixed.log()
            if not op.stateless:
                state = here if here < width else -1
        op.expected[slot] = expected
    full = op.counts[0] > 1024
    op.counts[:, full] = op.counts[:, full] // 2
