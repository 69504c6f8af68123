# SPDX-License-Identifier: Apache-2.0
"""Best-first expansion against brute force over all prefixes, and the kernel against the heap."""

from __future__ import annotations

import itertools

import pytest
import torch
from op_helpers import Trees, assert_same, lattice, moved, poisoned_trees, prefixes, versions
from torch import Tensor

from bastion_kernels import expand_best_first


def expand(run, tokens: Tensor, logprobs: Tensor, limit: int, **options) -> Trees:
    """Run on slots = 0, 1, ... and return the trees, on the CPU."""
    reqs = tokens.shape[0]
    slots = options.get("slots", torch.arange(reqs))
    num_slots = options.get("num_slots", max(reqs, int(slots.max()) + 1))
    device = options.get("device", torch.device("cpu"))
    out = poisoned_trees(reqs, num_slots, limit, options.get("wider", 0)).to(device)
    inputs = (moved(tensor, device) for tensor in (tokens, logprobs, slots))
    run(*inputs, *out)
    return out.to(torch.device("cpu"))


def all_scores(tokens: Tensor, logprobs: Tensor) -> dict[tuple[int, ...], float]:
    """log rho of every prefix of one lattice `[D, K]`, summed in fp32 from the root down."""
    scores: dict[tuple[int, ...], float] = {}
    for depth in range(1, len(tokens) + 1):
        for ranks in itertools.product(range(tokens.shape[1]), repeat=depth):
            total = torch.zeros((), dtype=torch.float32)
            for d, rank in enumerate(ranks):
                total = total + logprobs[d, rank]
            scores[tuple(int(tokens[d, rank]) for d, rank in enumerate(ranks))] = total.item()
    return scores


@pytest.mark.parametrize("ties", [False, True])
def test_reference_is_best_first_by_brute_force(ties: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    tokens, logprobs = lattice(125, 3, 3, generator)
    if ties:
        logprobs = (logprobs * 2).round() / 2
    for limit in (1, 7, 39, 45):
        trees = expand(expand_best_first.reference, tokens, logprobs, limit)
        for row in range(len(tokens)):
            scores = all_scores(tokens[row], logprobs[row])
            paths = prefixes(trees, row)
            assert len(set(paths)) == len(paths) == min(limit, 39)
            assert all(path[:-1] in {(), *paths} for path in paths), "prefix-closed"
            found = trees.log_rho[row, : len(paths)].tolist()
            assert found == [scores[path] for path in paths]
            assert found == sorted(scores.values(), reverse=True)[:limit], "the best of all"


def test_smaller_trees_are_prefixes_of_larger_ones() -> None:
    tokens, logprobs = lattice(1, 15, 8, torch.Generator().manual_seed(2))
    large = expand(expand_best_first.reference, tokens, logprobs, 128)
    for limit in (1, 2, 33, 127):
        small = expand(expand_best_first.reference, tokens, logprobs, limit)
        for one, other in zip(list(small)[:4], list(large)[:4], strict=True):
            assert_same(one, other[:, :limit])


def test_unused_columns_and_inert_rows() -> None:
    tokens, logprobs = lattice(2, 2, 2, torch.Generator().manual_seed(3))
    trees = expand(
        expand_best_first.reference,
        tokens,
        logprobs,
        9,
        slots=torch.tensor([-1, 3]),
        num_slots=5,
    )
    assert trees.num_nodes.tolist() == [-7777, -7777, -7777, 6, -7777]
    assert trees.tokens[0].eq(-7777).all()
    assert trees.tokens[1, 6:].eq(0).all()
    assert trees.parents[3, 6:].eq(-1).all() and trees.depths[3, 6:].eq(0).all()
    assert trees.log_rho[3, 6:].eq(float("-inf")).all()
    for tensor in (trees.parents, trees.depths):
        assert tensor[[0, 1, 2, 4]].eq(-7777).all()
    assert trees.log_rho[[0, 1, 2, 4]].isnan().all()


def test_one_candidate_per_depth_gives_the_top_1_chain() -> None:
    tokens, logprobs = lattice(1, 5, 4, torch.Generator().manual_seed(4))
    for limit in (3, 5, 8):
        trees = expand(expand_best_first.reference, tokens[..., :1], logprobs[..., :1], limit)
        used = min(5, limit)
        assert trees.num_nodes.item() == used
        assert trees.tokens[0, :used].tolist() == tokens[0, :used, 0].tolist()
        assert trees.parents[0, :used].tolist() == list(range(used))
        torch.testing.assert_close(
            trees.log_rho[0, :used], logprobs[0, :used, 0].cumsum(0), rtol=1e-6, atol=1e-6
        )


def test_impossible_candidates_are_left_out() -> None:
    tokens = torch.arange(6, dtype=torch.int32).view(1, 2, 3)
    inf, nan = float("inf"), float("nan")
    logprobs = torch.tensor([[[-0.5, -inf, -inf], [0.25, nan, -1.0]]])
    trees = expand(expand_best_first.reference, tokens, logprobs, 4)
    assert trees.num_nodes.item() == 2  # a probability above 1 counts as 1, NaN ends its row
    assert trees.log_rho[0, :2].tolist() == [-0.5, -0.5]


CASES = {  # R, D, K, N
    "usual": (2, 15, 8, 64),
    "one node": (2, 15, 8, 1),
    "one of all": (1, 1, 1, 1),
    "N not a power of two": (3, 7, 5, 37),
    "chain": (2, 4, 1, 16),
    "star": (2, 1, 32, 20),
    "exhausted": (3, 2, 2, 16),
    "everything": (1, 3, 3, 39),
    "full depth": (1, 16, 2, 70),
}


@pytest.mark.parametrize("run", versions(expand_best_first.triton, expand_best_first.cpu))
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize(
    "scores",
    ["ties", "broken", *(pytest.param(s, marks=pytest.mark.slow) for s in ("distinct", "equal"))],
)
def test_kernel_equals_heap(run, case: tuple[int, ...], scores: str, device: torch.device) -> None:
    reqs, depth, width, limit = case
    generator = torch.Generator().manual_seed(limit)
    tokens, logprobs = lattice(reqs, depth, width, generator)
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
    expected = expand(expand_best_first.reference, tokens, logprobs, limit, **options)
    actual = expand(run, tokens, logprobs, limit, device=device, **options)
    for name, one, other in zip(vars(expected), actual, expected, strict=True):
        assert_same(one, other, name)


@pytest.mark.parametrize("run", versions(expand_best_first.triton, expand_best_first.cpu))
def test_kernel_equals_heap_on_random_trees(run, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(5)
    slow = run is expand_best_first.triton and device.type == "cpu"
    for _ in range(60 if slow else 1000):
        depth, width, limit = (int(torch.randint(1, 7, (), generator=generator)) for _ in range(3))
        tokens, logprobs = lattice(2, depth, width, generator, spread=4.0)
        expected = expand(expand_best_first.reference, tokens, logprobs, limit)
        actual = expand(run, tokens, logprobs, limit, device=device)
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other)


@pytest.mark.parametrize(
    "run", [pytest.param(expand_best_first.triton, marks=pytest.mark.gpu), expand_best_first.cpu]
)
@pytest.mark.parametrize("case", [(64, 16, 32, 512), (1, 15, 32, 256), (1, 255, 255, 4096)])
def test_kernel_equals_heap_at_full_size(run, case: tuple[int, ...], device: torch.device) -> None:
    if run is expand_best_first.cpu:
        device = torch.device("cpu")
    reqs, depth, width, limit = case
    tokens, logprobs = lattice(reqs, depth, width, torch.Generator().manual_seed(6))
    expected = expand(expand_best_first.reference, tokens, logprobs, limit)
    actual = expand(run, tokens, logprobs, limit, device=device)
    for one, other in zip(actual, expected, strict=True):
        assert_same(one, other)


def test_strided_inputs(device: torch.device) -> None:
    tokens, logprobs = lattice(2, 4, 6, torch.Generator().manual_seed(7))
    expected = expand(expand_best_first.reference, tokens, logprobs, 20)
    tokens = tokens.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    logprobs = torch.stack([logprobs, logprobs.neg()], dim=-1)[..., 0]
    assert not tokens.is_contiguous() and not logprobs.is_contiguous()
    for run in versions(expand_best_first, expand_best_first.triton, expand_best_first.cpu):
        actual = expand(run, tokens, logprobs, 20, device=device)
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other)


def test_wrong_arguments_are_named() -> None:
    tokens, logprobs = lattice(1, 2, 2, torch.Generator().manual_seed(8))
    slots = torch.zeros(1, dtype=torch.int64)
    out = poisoned_trees(1, 1, 4)
    with pytest.raises(TypeError, match=r"topk_logprobs must be torch\.float32"):
        expand_best_first(tokens, logprobs.double(), slots, *out)
    with pytest.raises(ValueError, match=r"slots must have shape \[1\], got \[2\]"):
        expand_best_first(tokens, logprobs, slots.repeat(2), *out)
    out = poisoned_trees(1, 1, 5000)
    with pytest.raises(ValueError, match="N <= 4096"):
        expand_best_first(tokens, logprobs, slots, *out)
