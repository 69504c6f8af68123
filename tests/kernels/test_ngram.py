# SPDX-License-Identifier: Apache-2.0
"""Lookup: the table against all pairs of places, the mixture and its trees against brute force."""

from __future__ import annotations

import itertools
import math
import operator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from op_helpers import Trees, assert_same, call, lattice, poisoned, poisoned_trees, runs, versions
from torch import Tensor

from bastion_kernels import (
    add_prompt,
    expand_best_first,
    find_ngram,
    keep_replies,
    mix_ngram,
    ngram_priors,
    ngram_table,
)
from bastion_kernels.draft.ngram_table import LENGTHS, LONGEST, SHORTEST
from tests import references
from tests.references.lookup import best_match, matched

EXPANDS = versions(expand_best_first.triton, expand_best_first.cpu)
FINDS = versions(references.find_ngram, find_ngram.triton, find_ngram.cpu)
KEEPS = versions(references.keep_replies, keep_replies.triton, keep_replies.cpu)
ADDS = versions(add_prompt.triton, add_prompt.cpu)
SLOW = {find_ngram.triton: 3}  # in its interpreter, which gets fewer rounds
longest_match = partial(best_match, lengths=range(SHORTEST, LONGEST + 1))
Found = tuple[int, bool, int]  # m, whether it is own text, p


class Index:
    """What lookups of some slots share, and the texts of their requests."""

    def __init__(self, slots: int, most: int, entries: int | None = None, kept: int = 1) -> None:
        zeros = partial(torch.zeros, dtype=torch.int32)
        longs = partial(torch.zeros, dtype=torch.int64)
        self.texts: list[list[int]] = [[] for _ in range(slots)]
        self.history = torch.full((slots, most), 1, dtype=torch.int32)
        self.last, self.counts = zeros(slots, 3), zeros(2, 2 * (LONGEST + 1))
        self.groups, self.begins = longs(slots), zeros(slots)
        self.ring, self.ring_groups, self.head = zeros(kept), longs(kept), longs(1)
        self.table = ngram_table(20 * (slots * most + kept), torch.device("cpu"))[:entries].clone()
        self.clock, self.found = torch.ones(1, dtype=torch.int64), longs(slots)
        self.drafts, self.numbers = zeros(slots, 31), longs(slots)

    def grow(self, slot: int, tokens: list[int]) -> None:
        text = self.texts[slot]
        self.history[slot, len(text) : len(text) + len(tokens)] = torch.tensor(tokens).int()
        text += tokens

    def restart(self, slot: int, group: int = 0, begin: int = 0) -> None:
        """Another request takes the slot; behind its text is what the one before left."""
        self.texts[slot] = []
        self.last[slot], self.groups[slot], self.begins[slot] = 0, group, begin
        self.clock += 1
        self.numbers[slot] = self.clock

    @property
    def lengths(self) -> Tensor:
        return torch.tensor([len(text) for text in self.texts], dtype=torch.int32)

    def behind(self, slot: int) -> int:
        """The place behind the previous draft of own text, -1 without one."""
        start, code, then = self.last[slot].tolist()
        return start + len(self.texts[slot]) - then if code & 1 else -1

    def look_up(self, run: Any, slots: list[int]) -> list[Found]:
        """What is found for every slot; the next lookup judges it."""
        call(
            run, self.history, self.lengths, torch.tensor(slots), self.last, self.counts,
            self.groups, self.ring, self.ring_groups, self.table, self.clock, self.found,
            self.drafts,
        )  # fmt: skip
        results = []
        for slot in slots:
            code, place = divmod(int(self.found[slot]) if slot >= 0 else 0, 1 << 32)
            if slot >= 0:
                self.last[slot] = torch.tensor([place, code, len(self.texts[slot])])
            results.append((code >> 1, code & 1 == 1, place))
        return results

    def add(self, run: Any, slot: int, begin: int, end: int) -> None:
        """Add a part of a prompt."""
        slots = torch.tensor([slot])
        call(run, self.history, slots, self.numbers, self.table, begin, end)

    def end(self, run: Any, slots: list[int]) -> None:
        """Keep the replies of these requests."""
        call(
            run, self.history, self.lengths, self.begins, self.groups, torch.tensor(slots),
            self.ring, self.ring_groups, self.head, self.table, self.clock,
        )  # fmt: skip


def search(run: Any, texts: list[list[int]], **given: Tensor) -> list[tuple[int, int]]:
    """m and p of every text."""
    index = Index(len(texts), max(map(len, texts)) + 3)
    for slot, text in enumerate(texts):
        index.grow(slot, text)
    for name, value in given.items():
        setattr(index, name, value)
    found = index.look_up(run, list(range(len(texts))))
    assert all(own == (match > 0) for match, own, _ in found)
    for text, draft, (match, _, place) in zip(texts, index.drafts.tolist(), found, strict=True):
        assert draft == ((text[place:] * 31)[:31] if match else [0] * 31)
    return [(match, place) for match, _, place in found]


def sampled(rng: np.random.Generator) -> list[int]:
    """A text of few words or of many, or one that repeats itself with gaps."""
    words, size = int(rng.choice([2, 3, 10, 50_000])), int(rng.choice([1, 3, 17, 60, 300]))
    text: list[int] = rng.integers(words, size=size).tolist()
    if size > 17 and rng.random() < 0.5:
        begin, count = rng.integers(size // 2), rng.integers(2, 45)
        text += [words, *text[begin : begin + count], words + 1, *text[begin : begin + count // 2]]
    return text


@runs(find_ngram)
def test_the_longest_match_is_found_and_the_latest_of_them(run) -> None:
    rng = np.random.default_rng(1)
    texts = [[5], [5, 5], [5, 5, 5], [1, 2, 1, 2], [7] * 40, [1, 2, 3] * 30, [1, 2, 3, 9, 2, 3]]
    texts += [sampled(rng) for _ in range(12)]
    copied = list(range(100))
    texts += [[*copied, 7, *copied[20:60]], [*copied[:9], *copied[:9], *copied[1:9]]]
    assert longest_match(texts[-2]) == (32, 60)
    found = search(run, texts)
    assert found == [*map(best_match, texts)]
    for (match, _), (longest, _) in zip(found, map(longest_match, texts), strict=True):
        assert not any(match < length <= longest for length in LENGTHS)


@runs(find_ngram)
def test_an_index_that_grows_by_new_tokens(run) -> None:
    """Requests that grow by steps, skip some, and leave their slots to others."""
    rng = np.random.default_rng(2)
    index = Index(4, 400)
    for _ in range(40 // SLOW.get(run, 1)):
        for slot, text in enumerate(index.texts):
            if not text or len(text) > 300 or rng.random() < 0.1:
                # the same words in another place, or others
                old = index.texts[int(rng.integers(4))]
                index.restart(slot)
                index.grow(slot, (old[3:40] if rng.random() < 0.5 else sampled(rng)[:100]) or [1])
            if rng.random() < 0.8:
                match, place = longest_match(index.texts[slot])
                copied = index.texts[slot][place : place + int(rng.integers(9))] if match else []
                index.grow(slot, [*copied, int(rng.integers(3))])
        slots = [int(slot) for slot in rng.permutation(5)[:4] - 1]
        behind = [index.behind(slot) if slot >= 0 else -1 for slot in slots]
        for slot, at, (match, _, place) in zip(slots, behind, index.look_up(run, slots)):
            if slot >= 0:
                assert (match, place) == best_match(index.texts[slot], behind=at)


@pytest.mark.parametrize(("run", "add"), zip(FINDS[1:], ADDS, strict=True))
def test_prompts_that_are_added_in_parts(run, add) -> None:
    """From the end; a place of those, or of what the slot's last request left, is found."""
    rng = np.random.default_rng(6)
    index, missing = Index(3, 700), [0] * 3
    for _ in range(24 // SLOW.get(run, 1)):
        for slot, text in enumerate(index.texts):
            if not text or len(text) > 400 or rng.random() < 0.1:
                old = index.texts[int(rng.integers(3))]
                index.restart(slot)
                index.grow(slot, [*old[3:90], *sampled(rng)])
                missing[slot] = index.last[slot, 2] = len(index.texts[slot])
            elif rng.random() < 0.7:
                begin = max(missing[slot] - int(rng.integers(150)), 0)
                index.add(add, slot, begin, missing[slot])
                missing[slot] = begin
            index.grow(slot, index.texts[slot][-3:-1] if rng.random() < 0.5 else [1])
        slots = rng.permutation(3).tolist()
        behind = [index.behind(slot) for slot in slots]
        for slot, at, (match, _, place) in zip(slots, behind, index.look_up(run, slots)):
            text = index.texts[slot]
            assert match == matched(text, text[:place])
            assert (match, place) >= best_match(text, behind=at, begin=missing[slot])
            assert missing[slot] or (match, place) == best_match(text, behind=at)


@runs(find_ngram)
def test_a_draft_that_was_right_goes_on(run) -> None:
    """Where the table has a later place for as many tokens as it has an entry for."""
    index = Index(1, 30)
    index.grow(0, [1, 2, 3, 4, 5, 20, 9, 2, 3, 4, 5, 21, 1, 2, 3, 4])
    assert index.look_up(run, [0]) == [(4, True, 4)]
    index.grow(0, [5])
    assert best_match(index.texts[0]) == (4, 11)
    assert index.look_up(run, [0]) == [(5, True, 5)]


def test_a_table_that_is_too_small_loses_matches_and_invents_none() -> None:
    indices, lost = [], 0
    for run, keep in zip(FINDS[1:], KEEPS[1:], strict=True):
        rng = np.random.default_rng(3)
        index = Index(3, 200, entries=64, kept=50)
        for _ in range(12):
            for slot in range(3):
                if len(index.texts[slot]) > 150:
                    index.end(keep, [slot])
                    index.restart(slot, group=1)
                index.grow(slot, sampled(rng)[:20])
            slots = [2, 0, 1]
            for slot, (match, own, place) in zip(slots, index.look_up(run, slots), strict=True):
                text = index.texts[slot]
                if own:
                    assert place < len(text) and match == matched(text, text[:place])
                lost += (match, place) < best_match(text)
        indices.append(vars(index))
    assert lost > 0
    for other in indices[1:]:
        assert_same(other, indices[0])


@pytest.mark.parametrize(
    "run", [pytest.param(find_ngram.triton, marks=pytest.mark.gpu), find_ngram.cpu]
)
def test_a_long_history(run) -> None:
    text = torch.randint(50_000, (131_072,), generator=torch.Generator().manual_seed(2)).tolist()
    texts = [[*text, *text[77:81]], [*text, 1, 50_001], [*text, *text[3000:3040]]]
    assert search(run, texts) == [(4, 81), (0, 0), (32, 3040)]


@pytest.mark.parametrize(("run", "keep"), zip(FINDS, KEEPS, strict=True))
def test_replies_of_other_requests_of_the_group(run, keep) -> None:
    index = Index(4, 60, kept=100)
    reply = [*range(10, 30)]
    for slot, group, prompt in ((0, 7, [1, 2]), (1, 8, [1, 2]), (2, 0, [1, 2])):
        index.restart(slot, group, begin=2)
        index.grow(slot, [*prompt, *reply, 90 + slot])
    index.end(keep, [0, 1, 2])
    assert index.ring.tolist()[:44] == [*reply, 90, -1, *reply, 91, -1]
    assert index.ring_groups.tolist()[:44] == [7] * 21 + [0] + [8] * 21 + [0]
    for slot, group in ((0, 7), (1, 8), (2, 9), (3, 0)):
        index.restart(slot, group)
        index.grow(slot, [50, 12, 13, 14])
    none = 0, False, 0
    assert index.look_up(run, [0, 1, 2, 3]) == [(3, False, 5), (3, False, 27), none, none]
    for slot in (0, 1):  # to the end of the reply, then again
        assert index.drafts[slot].tolist() == ([*reply[5:], 90 + slot] * 2)[:31]
    assert not index.drafts[2:].any()
    # It was right twice; the place behind it is found, and own text wins if it matches as long.
    index.grow(0, [15, 16, 60])
    index.grow(1, [15, 16, 12, 13, 14])
    index.grow(3, [12, 13, 14])
    assert index.look_up(run, [0, 1, 3]) == [none, (3, True, 4), (3, True, 4)]
    others = LONGEST + 1
    assert index.counts[0].nonzero().flatten().tolist() == [others + m for m in (3, 4, 5)]
    assert index.counts[:, others + 3 : others + 6].tolist() == [[2, 2, 2], [2, 2, 0]]


@pytest.mark.parametrize(("run", "keep"), zip(FINDS[1:], KEEPS[1:], strict=True))
def test_a_ring_that_wraps_around_and_tenants_that_never_meet(run, keep) -> None:
    """Every token says whose it is, and nothing but the ring is left of a request that ended."""
    rng = np.random.default_rng(5)
    index, texts, found_others = Index(6, 120, kept=150), {1: [], 2: [], 3: []}, 0
    for _ in range(60 // SLOW.get(run, 1)):
        for slot in range(6):
            group = int(index.groups[slot])
            if group == 0 or len(index.texts[slot]) > 40:
                if group:
                    index.end(keep, [slot])
                    texts[group].append(index.texts[slot][int(index.begins[slot]) :])
                group = int(rng.integers(1, 4))
                index.restart(slot, group, begin=int(rng.integers(4)))
                index.grow(slot, (1000 * group + rng.integers(30, size=5)).tolist())
            draft = index.drafts[slot, : rng.integers(8)].tolist()
            before = texts[group][-1] if texts[group] and rng.random() < 0.5 else []
            begin = int(rng.integers(len(before) + 1))
            tokens = [*before[begin : begin + 6], *draft, int(rng.integers(30))]
            index.grow(slot, [1000 * group + token % 1000 for token in tokens])
        slots = rng.permutation(6).tolist()
        for slot, (match, own, place) in zip(slots, index.look_up(run, slots), strict=True):
            group, text = int(index.groups[slot]), index.texts[slot]
            longest, _ = longest_match(text)
            assert not any(match < length <= longest for length in LENGTHS)
            if match == 0:
                continue
            draft = index.drafts[slot].tolist()
            assert {token // 1000 for token in draft} == {group}
            if own:
                assert match == matched(text, text[:place])
                assert draft == (text[place:] * 31)[:31]
                continue
            found_others += 1
            joined = [token for reply in texts[group] for token in (*reply, -1)]
            pattern = [*text[-match:], draft[0]]
            windows = zip(*(joined[i:] for i in range(len(pattern))))
            assert tuple(pattern) in windows, "a reply of the group has it"
    assert found_others > 20 // SLOW.get(run, 1) and int(index.head) > 0
    kept = [(token, group) for token, group in zip(index.ring, index.ring_groups) if group]
    assert all(token // 1000 == group for token, group in kept)


@runs(find_ngram)
def test_copies_are_judged_by_what_was_emitted(run) -> None:
    # Found at n = 6 with m = 3, p = 3 of a period of 3; then 1, 2, 3 and 9 were emitted.
    texts = [[1, 2, 3, 1, 2, 3, 1, 2, 3, 9], [4, 5, 6, 7, 8, 4], [1, 1, 1, 1]]
    last = torch.tensor([[3, 7, 6], [0, 0, 5], [1, 63, 2]], dtype=torch.int32)
    counts = torch.zeros(2, 2 * (LONGEST + 1), dtype=torch.int32)
    drafts = torch.tensor([[1, 2, 3], [0, 0, 0], [1, 1, 1]], dtype=torch.int32).repeat(1, 11)
    index = Index(3, 12)
    for slot, text in enumerate(texts):
        index.grow(slot, text)
    index.last, index.counts, index.drafts = last, counts, drafts[:, :31].clone()
    index.look_up(run, [0, 1, 2, -1])
    tried = {3: 1, 4: 1, 5: 1, 6: 1, 31: 1, 32: 1}
    right = {3: 1, 4: 1, 5: 1, 31: 1, 32: 1}
    assert {i: n for i, n in enumerate(counts[0].tolist()) if n} == tried
    assert {i: n for i, n in enumerate(counts[1].tolist()) if n} == right


KINDS = ("marginals", "transitions", "nothing")
OTHERS = 2  # the request whose copy is from other requests' replies


class Case:
    """A batch with copies, and the same mixture written out node by node."""

    def __init__(self, kind: str, seed: int, depth: int = 3, width: int = 3, length: int = 5):
        generator = torch.Generator().manual_seed(seed)
        reqs = 3
        if kind == "nothing":
            depth = 0
        tokens, logprobs = lattice(reqs, depth, width, generator)
        if kind == "transitions":
            shape = (reqs, depth, width, width)
            logprobs = torch.randn(*shape, generator=generator).log_softmax(-1)
        else:
            logprobs = logprobs[:, :, None]
        self.kind, self.reqs, self.depth, self.width, self.length = kind, reqs, depth, width, length
        self.tokens, self.logprobs = tokens, logprobs
        # Request 1 has no copy; the others' texts continue with tokens of the lattice and others.
        texts = []
        for r in range(reqs):
            of_lattice = [int(tokens[r, d, (r + d) % width]) for d in range(depth)]
            texts.append([90, 91, *of_lattice[: 2 + r], 95, 96, 97, 90, 91])
        texts[1] = [1, 2, 3, 4]
        self.texts = texts
        shape = 2, 2 * (LONGEST + 1)
        self.counts = torch.randint(0, 9, shape, generator=generator).sort(0, True)[0]
        self.counts = self.counts.int()

    def mixed(self, run: Any = references.mix_ngram) -> tuple[list[Tensor], dict[str, Tensor]]:
        reqs, length, width = self.reqs, self.length, self.width
        index = Index(reqs, max(map(len, self.texts)))
        for slot, text in enumerate(self.texts):
            index.grow(slot, text)
        index.look_up(references.find_ngram, list(range(reqs)))
        index.found[OTHERS] &= ~(1 << 32)
        state = {
            "last": torch.zeros(reqs, 3, dtype=torch.int32),
            "counts": self.counts.clone(),
            "expected": poisoned(reqs, dtype=torch.float32),
        }
        ngram = [
            poisoned(reqs, length, dtype=torch.int32),
            poisoned(reqs, length, dtype=torch.int32),
            poisoned(reqs, length, width + 1, dtype=torch.float32),
        ]
        call(
            run, index.drafts, index.lengths, torch.arange(reqs), index.found, state["last"],
            state["counts"], ngram_priors(), torch.zeros(1, dtype=torch.int32), self.tokens,
            self.logprobs, *ngram, state["expected"],
        )  # fmt: skip
        return ngram, state

    def chances(self, r: int) -> list[float]:
        """w by match length."""
        trials, right = self.counts[:, LONGEST + 1 :] if r == OTHERS else self.counts
        some = slice(LONGEST + 1)
        priors = 16 * ngram_priors()[some].double()
        found: list[float] = ((right[some] + priors) / (trials[some] + 16)).tolist()
        return found

    def paths(self, r: int) -> dict[tuple[int, ...], tuple[float, int]]:
        """Score and source of every prefix of a request's mixed lattice."""
        match, start = longest_match(self.texts[r])
        text, copy = list(self.texts[r]), []
        for d in range(self.length if match else 0):
            copy.append(text[start + d])
            text.append(copy[-1])
        w = self.chances(r)
        found: dict[tuple[int, ...], tuple[float, int]] = {}

        def grow(path: tuple[int, ...], score: float, row: int) -> None:
            d = len(path)
            on_copy = d < len(copy) and list(path) == copy[:d]
            if d >= (self.length if on_copy else self.depth):
                return
            own = dict.fromkeys(self.tokens[r, d].tolist(), 0.0) if d < self.depth else {}
            if d < self.depth and row >= 0:
                q = self.logprobs[r, d, row].double().exp().tolist()
                own = dict(zip(own, q, strict=True))
            chance = w[min(match + d, LONGEST)] if on_copy else 0.0
            mixture = {token: (1 - chance) * q for token, q in own.items()}
            if on_copy:
                mixture[copy[d]] = mixture.get(copy[d], 0.0) + chance
            for token, q in mixture.items():
                if q == 0.0:
                    continue
                here = [*own].index(token) if token in own else -1
                after = here if self.kind == "transitions" else 0
                copied = on_copy and token == copy[d]
                source = (2 + (here >= 0)) if copied else 1
                found[(*path, token)] = score + math.log(q), source
                grow((*path, token), score + math.log(q), after)

        grow((), 0.0, 0)
        return found


def grown(run: Any, case: Case, top_k: int, limit: int) -> tuple[Trees, Tensor]:
    """The trees of a case, and the source of every node."""
    out = poisoned_trees(case.reqs, case.reqs, limit)
    sources = poisoned(case.reqs, 40, dtype=torch.int32)
    given = case.tokens, case.logprobs, top_k, torch.arange(case.reqs), *out
    call(run, *given, *case.mixed()[0], sources)
    return out, sources


@runs(mix_ngram)
@pytest.mark.parametrize("kind", KINDS)
def test_mixture(run, kind: str) -> None:
    case = Case(kind, 3)
    (ngram, state), (expected, expected_state) = case.mixed(run), case.mixed()
    for name in ("last", "counts"):
        assert_same(state[name], expected_state[name])
    assert_same(ngram[:2], expected[:2])
    torch.testing.assert_close(ngram[2], expected[2], equal_nan=True, atol=2e-6, rtol=0)
    for r, expected in enumerate(state["expected"].tolist()):
        w, match = case.chances(r), longest_match(case.texts[r])[0]
        right = [w[min(match + d, LONGEST)] for d in range(case.length)] if match else []
        assert expected == pytest.approx(sum(itertools.accumulate(right, operator.mul)), abs=1e-5)


@runs(mix_ngram)
def test_many_trials_are_halved(run) -> None:
    case = Case("marginals", 4)
    case.counts[:, 50], case.counts[:, 6] = torch.tensor([1025, 701]), torch.tensor([1024, 900])
    before = case.counts.clone()
    _, state = case.mixed(run)
    before[:, 50] = torch.tensor([512, 350])
    assert torch.equal(state["counts"], before)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_trees_with_copies_by_brute_force(kind: str, seed: int) -> None:
    case = Case(kind, seed)
    out, sources = grown(references.expand_best_first, case, 9, 40)
    for r in range(case.reqs):
        every = case.paths(r)
        count = min(len(every), 40)
        assert int(out.num_nodes[r]) == count
        paths: list[tuple[int, ...]] = [()]
        for column in range(count):
            parent = int(out.parents[r, column])
            paths.append((*paths[parent], int(out.tokens[r, column])))
            score, source = every[paths[-1]]
            assert float(out.log_rho[r, column]) == pytest.approx(score, abs=1e-5)
            assert int(sources[r, column]) == source
            assert int(out.depths[r, column]) == len(paths[-1])
        assert len(set(paths)) == count + 1, "one node a prefix"
        scores = out.log_rho[r, :count].tolist()
        best = sorted((score for score, _ in every.values()), reverse=True)[:count]
        assert scores == pytest.approx(best, abs=1e-5)
        assert sources[r, count:].eq(0).all()


@pytest.mark.parametrize(
    ("run", "top_k"),
    [
        pytest.param(run, top_k, marks=[pytest.mark.slow] * (top_k != 2 and run is EXPANDS[0]))
        for run in EXPANDS
        for top_k in (1, 2, 9)
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_grow_the_references_trees(run, kind: str, top_k: int) -> None:
    case = Case(kind, 7, depth=4, width=4, length=9)
    trees, sources = grown(run, case, top_k, 40)
    expected, expected_sources = grown(references.expand_best_first, case, top_k, 40)
    assert_same(trees, expected)
    assert_same(sources, expected_sources)
