# SPDX-License-Identifier: Apache-2.0
"""Lookup: the search against all pairs of places, the mixture and its trees against brute force."""

from __future__ import annotations

import itertools
import math
import operator
from typing import Any

import pytest
import torch
from op_helpers import Trees, assert_same, call, lattice, poisoned, poisoned_trees, runs, versions
from torch import Tensor

from bastion_kernels import (
    expand_best_first,
    find_ngram,
    mix_ngram,
    ngram_priors,
)
from bastion_kernels.draft.find_ngram import LONGEST
from tests import references
from tests.references.lookup import longest_match

EXPANDS = versions(expand_best_first.triton, expand_best_first.cpu)


def histories(texts: list[list[int]], most: int = 0) -> tuple[Tensor, Tensor]:
    """Texts as the rows of a longer buffer, with the beginning of another text behind each."""
    most = max(most, *map(len, texts)) + 3
    out = torch.full((len(texts), most), 1, dtype=torch.int32)
    for row, text in enumerate(texts):
        out[row, : len(text)] = torch.tensor(text, dtype=torch.int32)
    return out, torch.tensor([len(text) for text in texts], dtype=torch.int32)


def search(run: Any, texts: list[list[int]], **given: Tensor) -> Tensor:
    """`found` of every text, as [R, 2] m and p."""
    history, lengths = histories(texts)
    reqs = len(texts)
    empty = {
        "last": torch.zeros(reqs, 3, dtype=torch.int32),
        "counts": torch.zeros(2, LONGEST + 1, dtype=torch.int32),
        "found": torch.zeros(reqs, dtype=torch.int64),
    }
    every = {"slots": torch.arange(reqs), **empty, **given}
    call(run, history=history, lengths=lengths, **every)
    return torch.stack([every["found"] >> 32, every["found"] & 0xFFFFFFFF], dim=1)


@runs(find_ngram)
def test_the_longest_match_is_found_and_the_latest_of_them(run) -> None:
    generator = torch.Generator().manual_seed(1)
    texts = [[5], [5, 5], [5, 5, 5], [1, 2, 1, 2], [7] * 40, [1, 2, 3] * 30, [1, 2, 3, 9, 2, 3]]
    for words in (2, 3, 10):
        for size in (3, 17, 60, 300):
            texts.append(torch.randint(words, (size,), generator=generator).tolist())
    copied = list(range(100))
    texts += [[*copied, 7, *copied[20:60]], [*copied[:9], *copied[:9], *copied[1:9]]]
    assert longest_match(texts[-2]) == (32, 60)
    assert search(run, texts).tolist() == [[*longest_match(text)] for text in texts]


@pytest.mark.parametrize(
    "run", [pytest.param(find_ngram.triton, marks=pytest.mark.gpu), find_ngram.cpu]
)
def test_a_long_history(run) -> None:
    text = torch.randint(50_000, (131_072,), generator=torch.Generator().manual_seed(2)).tolist()
    texts = [[*text, *text[77:81]], [*text, 1, 50_001], [*text, *text[3000:3040]]]
    assert search(run, texts).tolist() == [[4, 81], [0, 0], [32, 3040]]


@runs(find_ngram)
def test_copies_are_judged_by_what_was_emitted(run) -> None:
    # Found at n = 6 with m = 3, p = 3 of a period of 3; then 1, 2, 3 and 9 were emitted.
    texts = [[1, 2, 3, 1, 2, 3, 1, 2, 3, 9], [4, 5, 6, 7, 8, 4], [1, 1, 1, 1], [5, 6, 7]]
    last = torch.tensor([[3, 3, 6], [0, 0, 5], [2, 31, 2], [1, 2, 3]], dtype=torch.int32)
    counts = torch.zeros(2, LONGEST + 1, dtype=torch.int32)
    search(run, texts, last=last, counts=counts, slots=torch.tensor([0, 1, 2, -1]))
    tried = {3: 1, 4: 1, 5: 1, 6: 1, 31: 1, 32: 1}
    right = {3: 1, 4: 1, 5: 1, 31: 1, 32: 1}
    assert {i: n for i, n in enumerate(counts[0].tolist()) if n} == tried
    assert {i: n for i, n in enumerate(counts[1].tolist()) if n} == right


def chances(counts: Tensor) -> list[float]:
    trials, right = counts.double()
    return ((right + 16 * ngram_priors().double()) / (trials + 16)).tolist()


KINDS = ("marginals", "transitions", "nothing")


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
        self.history, self.lengths = histories(texts)
        self.counts = torch.randint(0, 9, (2, LONGEST + 1), generator=generator).sort(0, True)[0]
        self.counts = self.counts.int()

    def mixed(self, run: Any = references.mix_ngram) -> tuple[list[Tensor], dict[str, Tensor]]:
        reqs, length, width = self.reqs, self.length, self.width
        state = {
            "found": torch.zeros(reqs, dtype=torch.int64),
            "last": torch.zeros(reqs, 3, dtype=torch.int32),
            "counts": self.counts.clone(),
            "expected": poisoned(reqs, dtype=torch.float32),
        }
        text = self.history, self.lengths, torch.arange(reqs)
        references.find_ngram(*text, state["last"], state["counts"], state["found"])
        ngram = [
            poisoned(reqs, length, dtype=torch.int32),
            poisoned(reqs, length, dtype=torch.int32),
            poisoned(reqs, length, width + 1, dtype=torch.float32),
        ]
        call(
            run, *text, state["found"], state["last"], state["counts"], ngram_priors(),
            torch.zeros(1, dtype=torch.int32), self.tokens, self.logprobs, *ngram,
            state["expected"],
        )  # fmt: skip
        return ngram, state

    def paths(self, r: int) -> dict[tuple[int, ...], tuple[float, int]]:
        """Score and source of every prefix of a request's mixed lattice."""
        match, start = longest_match(self.texts[r])
        text, copy = list(self.texts[r]), []
        for d in range(self.length if match else 0):
            copy.append(text[start + d])
            text.append(copy[-1])
        w = chances(self.counts)
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
    for name in ("found", "last", "counts"):
        assert_same(state[name], expected_state[name])
    assert_same(ngram[:2], expected[:2])
    torch.testing.assert_close(ngram[2], expected[2], equal_nan=True, atol=2e-6, rtol=0)
    w = chances(case.counts)
    for expected, (match, _) in zip(state["expected"].tolist(), map(longest_match, case.texts)):
        right = [w[min(match + d, LONGEST)] for d in range(case.length)] if match else []
        assert expected == pytest.approx(sum(itertools.accumulate(right, operator.mul)), abs=1e-5)


@runs(mix_ngram)
def test_many_trials_are_halved(run) -> None:
    case = Case("marginals", 4)
    case.counts[:, 5], case.counts[:, 6] = torch.tensor([1025, 701]), torch.tensor([1024, 900])
    before = case.counts.clone()
    _, state = case.mixed(run)
    before[:, 5] = torch.tensor([512, 350])
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
