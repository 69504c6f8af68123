# SPDX-License-Identifier: Apache-2.0
"""Best-first expansion against brute force over all prefixes, and the kernels against the heap."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from op_helpers import assert_same, call, lattice, poisoned_trees, prefixes, runs, versions
from torch import Tensor

from bastion_kernels import expand_best_first
from tests import references

Lattice = tuple[Tensor, Tensor]  # tokens [R, D, M], log-probabilities [R, D, P, M]


def without_state(
    reqs: int, depth: int, width: int, generator: torch.Generator, spread: float = 2.0
) -> Lattice:
    """Candidates in order, one row for all nodes of a depth."""
    tokens, logprobs = lattice(reqs, depth, width, generator, spread)
    return tokens, logprobs[:, :, None]


def transitions(
    reqs: int, depth: int, width: int, generator: torch.Generator, spread: float = 2.0
) -> Lattice:
    """Distinct tokens, and unsorted rows: one for each candidate of the depth above."""
    tokens = torch.rand(reqs, depth, 4 * width + 3, generator=generator).argsort(-1)[..., :width]
    scores = spread * torch.randn(reqs, depth, width, width, generator=generator)
    return tokens.int(), scores.log_softmax(-1)


STATES = pytest.mark.parametrize("made", [without_state, transitions])
Made = Callable[..., Lattice]


def expand(run, tokens: Tensor, logprobs: Tensor, top_k: int, limit: int, **options):
    """Run on slots = 0, 1, ... and return the trees."""
    reqs = tokens.shape[0]
    slots = options.get("slots", torch.arange(reqs))
    num_slots = options.get("num_slots", max(reqs, int(slots.max()) + 1))
    out = poisoned_trees(reqs, num_slots, limit, options.get("wider", 0))
    call(run, tokens, logprobs, top_k, slots, *out)
    return out


def same(run, *given, **options) -> None:
    """Assert that a version grows the reference's trees."""
    expected = expand(references.expand_best_first, *given, **options)
    assert_same(expand(run, *given, **options), expected)


def in_order(tokens: Tensor, logprobs: Tensor, top_k: int) -> list[tuple[float, tuple[int, ...]]]:
    """Every prefix of one lattice whose nodes are among their parents' `top_k` best children.

    Its log rho, summed in fp32 from the root down, and its tokens; in the order of the tree: by
    score, then by the place of the parent, then by the order of the parent's row.
    """
    depth, width = tokens.shape
    by_token = logprobs.shape[1] > 1
    scores, places = {(): 0.0}, {}
    for length in range(1, depth + 1):
        for path in itertools.product(range(width), repeat=length):
            above, last = path[:-1], path[-1]
            row = logprobs[length - 1, above[-1] if above and by_token else 0]
            place = sorted(range(width), key=lambda k: (-row[k].item(), k)).index(last)
            if above in scores and place < top_k:
                scores[path] = (torch.tensor(scores[above]) + row[last]).item()
                places[path] = place
    number, rest, found = {(): 0}, set(scores) - {()}, []
    while rest:
        ready = [path for path in rest if path[:-1] in number]
        path = min(ready, key=lambda p: (-scores[p], number[p[:-1]], places[p]))
        rest.discard(path)
        number[path] = len(number)
        found.append((scores[path], tuple(int(tokens[d, k]) for d, k in enumerate(path))))
    return found


@STATES
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("top_k", [3, 2, 1])
def test_reference_is_best_first_by_brute_force(made: Made, ties: bool, top_k: int) -> None:
    tokens, logprobs = made(25, 3, 3, torch.Generator().manual_seed(1))
    if ties:
        logprobs = (logprobs * 2).round() / 2
    for row in range(len(tokens)):
        expected = in_order(tokens[row], logprobs[row], top_k)
        assert len(expected) == sum(top_k**d for d in (1, 2, 3))
        assert [score for score, _ in expected] == sorted((s for s, _ in expected), reverse=True)
        for limit in (1, 7, 39, 45):
            one = slice(row, row + 1)
            trees = expand(references.expand_best_first, tokens[one], logprobs[one], top_k, limit)
            used = int(trees.num_nodes[0])
            found = [*zip(trees.log_rho[0, :used].tolist(), prefixes(trees, 0), strict=True)]
            assert found == expected[:limit]


def test_unused_columns_and_inert_rows() -> None:
    tokens, logprobs = without_state(2, 2, 2, torch.Generator().manual_seed(3))
    slots = torch.tensor([-1, 3])
    trees = expand(references.expand_best_first, tokens, logprobs, 2, 9, slots=slots, num_slots=5)
    assert trees.num_nodes.tolist() == [-7777, -7777, -7777, 6, -7777]
    assert trees.tokens[0].eq(-7777).all()
    assert trees.tokens[1, 6:].eq(0).all()
    assert trees.parents[3, 6:].eq(-1).all() and trees.depths[3, 6:].eq(0).all()
    assert trees.log_rho[3, 6:].eq(float("-inf")).all()
    for tensor in (trees.parents, trees.depths):
        assert tensor[[0, 1, 2, 4]].eq(-7777).all()
    assert trees.log_rho[[0, 1, 2, 4]].isnan().all()


def test_impossible_candidates_are_left_out() -> None:
    tokens = torch.arange(6, dtype=torch.int32).view(1, 2, 3)
    inf, nan = float("inf"), float("nan")
    logprobs = torch.full((1, 2, 3, 3), nan)
    logprobs[0, 0, 0] = torch.tensor([-inf, nan, -0.5])
    logprobs[0, 1, 2] = torch.tensor([nan, 0.25, -1.0])
    trees = expand(references.expand_best_first, tokens, logprobs, 3, 4)
    assert trees.num_nodes.item() == 3  # a probability above 1 counts as 1
    assert trees.tokens[0].tolist() == [2, 4, 5, 0]
    assert trees.log_rho[0, :3].tolist() == [-0.5, -0.5, -1.5]
    one_row = torch.tensor([[[[-0.5, -inf, -inf]], [[0.25, nan, -1.0]]]])
    trees = expand(references.expand_best_first, tokens, one_row, 3, 4)
    assert trees.num_nodes.item() == 2  # NaN ends a row that is in order
    assert trees.log_rho[0, :2].tolist() == [-0.5, -0.5]


CASES = {  # R, D, M, top-K, N
    "usual": (2, 15, 8, 8, 64),
    "fewer children than candidates": (2, 7, 20, 6, 40),
    "one node": (2, 15, 8, 8, 1),
    "one of all": (1, 1, 1, 1, 1),
    "N not a power of two": (3, 7, 5, 5, 37),
    "chain": (2, 4, 5, 1, 16),
    "star": (2, 1, 32, 32, 20),
    "exhausted": (3, 2, 2, 2, 16),
    "everything": (1, 3, 3, 3, 39),
    "more children than candidates": (1, 3, 3, 9, 39),
    "full depth": (1, 16, 2, 2, 70),
}


def heap_cases() -> list[Any]:
    """Version, lattice and scores; most of the interpreter's are slow."""
    kernels = versions(expand_best_first.triton, expand_best_first.cpu)
    lattices, scores = (without_state, transitions), ("ties", "broken", "distinct", "equal")
    quick = {*itertools.product([expand_best_first.cpu], lattices, scores[:2])}
    quick |= {(kernels[0], without_state, "broken"), (kernels[0], transitions, "ties")}
    return [
        pytest.param(*case, marks=[] if case in quick else pytest.mark.slow)
        for case in itertools.product(kernels, lattices, scores)
    ]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize(("run", "made", "scores"), heap_cases())
def test_kernel_equals_heap(run, made: Made, case: tuple[int, ...], scores: str) -> None:
    reqs, depth, width, top_k, limit = case
    generator = torch.Generator().manual_seed(limit)
    tokens, logprobs = made(reqs, depth, width, generator)
    if scores == "ties":
        logprobs = logprobs.round()
    elif scores == "equal":
        logprobs = torch.zeros_like(logprobs)
    elif scores == "broken":
        hole = torch.rand(logprobs.shape, generator=generator)
        logprobs[hole < 0.2] = float("-inf")
        logprobs[hole < 0.1] = float("nan")
        logprobs[hole > 0.95] = 0.5
    slots = torch.randperm(reqs + 3, generator=generator)[:reqs]
    slots[reqs // 2] = -1 if reqs > 1 else slots[0]
    options = {"slots": slots, "num_slots": reqs + 3, "wider": 5}
    same(run, tokens, logprobs, top_k, limit, **options)


@STATES
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("run", "trees"),
    [
        (expand_best_first.cpu, 500),
        # Triton compiles for every shape, or interprets.
        (expand_best_first.triton, 8),
        pytest.param(expand_best_first.cpu, 1000, marks=pytest.mark.slow),
        pytest.param(expand_best_first.triton, 50, marks=pytest.mark.slow),
    ],
)
def test_kernel_equals_heap_on_random_trees(run, trees: int, made: Made) -> None:
    generator = torch.Generator().manual_seed(5)
    for _ in range(trees):
        depth, width, top_k, limit = torch.randint(1, 7, (4,), generator=generator).tolist()
        tokens, logprobs = made(2, depth, width, generator, spread=4.0)
        same(run, tokens, logprobs, top_k, limit)


@STATES
@pytest.mark.parametrize(
    "run", [pytest.param(expand_best_first.triton, marks=pytest.mark.gpu), expand_best_first.cpu]
)
@pytest.mark.parametrize(
    "case", [(16, 16, 16, 16, 512), (1, 15, 255, 32, 256), (1, 255, 16, 16, 1024)]
)
def test_kernel_equals_heap_at_full_size(run, made: Made, case: tuple[int, ...]) -> None:
    reqs, depth, width, top_k, limit = case
    tokens, logprobs = made(reqs, depth, width, torch.Generator().manual_seed(6))
    same(run, tokens, logprobs, top_k, limit)


@STATES
@runs(expand_best_first, expand_best_first)
def test_strided_inputs(run, made: Made) -> None:
    tokens, logprobs = made(2, 4, 6, torch.Generator().manual_seed(7))
    tokens = tokens.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    logprobs = torch.stack([logprobs, logprobs.neg()], dim=-1)[..., 0]
    assert not tokens.is_contiguous() and not logprobs.is_contiguous()
    same(run, tokens, logprobs, 4, 20)
