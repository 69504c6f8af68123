# SPDX-License-Identifier: Apache-2.0
"""Budgets against exact fractions, shares against full sorts; both are `references`."""

from __future__ import annotations

import math

import pytest
import torch
from op_helpers import DEVICE, assert_same, call, poisoned, refuses, runs, versions
from torch import Tensor

from bastion_kernels import choose_budget, take_best
from tests import references


def choose(run, log_rho, slots, limits, cost, base) -> list[int]:
    """Run on poisoned counts and return them."""
    out = poisoned(len(log_rho), dtype=torch.int32)
    call(run, log_rho, slots, limits, cost, base, out)
    return out.tolist()


def choose_and_promise(run, log_rho, *rest) -> tuple[list[int], Tensor]:
    """Run on poisoned counts and promises and return both."""
    out, promised = (poisoned(len(log_rho), dtype=t) for t in (torch.int32, torch.float32))
    call(run, log_rho, *rest, out, promised)
    return out.tolist(), promised


def take(run, log_rho, slots, limits, total) -> list[int]:
    """Run on poisoned outputs; nodes by slot, after a check that all sums agree."""
    reqs, rest = len(slots), 1 + 3 * torch.arange(len(log_rho), dtype=torch.int32)
    logits_start, rows_start, scratch = (poisoned(reqs + 3, dtype=torch.int32) for _ in range(3))
    scratch[0] = 0
    call(run, log_rho, slots, limits, rest, total, logits_start, rows_start, scratch)
    assert scratch[0] == 0
    out, logits, rows = [-7777] * len(log_rho), 0, 0
    if reqs == 0:
        return out
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            out[slot] = int(logits_start[row + 1] - logits_start[row]) - 1
            logits, rows = logits + out[slot] + 1, rows + out[slot] + int(rest[slot])
        assert (int(logits_start[row + 1]), int(rows_start[row + 1])) == (logits, rows)
    assert not logits_start[0] and not rows_start[0]
    for buffer in (logits_start, rows_start):
        assert_same(buffer[reqs + 1 :], poisoned(2, dtype=torch.int32))
    return out


def scores(slots: int, limit: int, generator: torch.Generator, ties: bool = False) -> Tensor:
    """Sorted path scores with an unused end."""
    log_rho = -3 * torch.rand(slots, limit, generator=generator).cumsum(1) / limit**0.5
    if ties:
        log_rho = log_rho.round()
    for row in range(slots):
        log_rho[row, int(torch.randint(0, limit + 1, (), generator=generator)) :] = -math.inf
    return log_rho


def costs(kind: str, rows: int, generator: torch.Generator) -> Tensor:
    """Cost of 0..rows rows."""
    row = torch.arange(rows + 1, dtype=torch.float32)
    return {
        "flat": torch.full((rows + 1,), 7.0),
        "linear": 5 + 0.05 * row,
        "convex": 5 + 0.001 * row**2,
        "staircase": 5 + 0.4 * (row / 16).floor(),
        "random": 1 + torch.rand(rows + 1, generator=generator),
    }[kind]


@pytest.mark.parametrize("run", versions(choose_budget.triton, choose_budget.cpu))
@pytest.mark.parametrize("kind", ["flat", "linear", "convex", "staircase", "random"])
def test_the_budget_is_the_exact_argmax(run, kind: str) -> None:
    generator = torch.Generator().manual_seed(3)
    sizes = [(1, 1, False), (1, 37, False), (3, 16, True), (5, 20, False)]
    if "cpu" in run.__name__:
        sizes += [(reqs, limit, ties) for reqs in range(1, 8) for limit in (1, 5, 8)
                  for ties in (False, True)]  # fmt: skip
    for reqs, limit, ties in sizes:
        log_rho = torch.cat([scores(reqs + 2, limit, generator, ties), torch.ones(reqs + 2, 3)], 1)
        log_rho = log_rho[:, :limit]  # rows of a longer buffer
        slots = torch.randperm(reqs + 2, generator=generator)[:reqs]
        if reqs > 2:
            slots[1] = -1
        limits = torch.randint(-1, limit + 9, (reqs + 2,), generator=generator).int()
        for rows, base in ((200, torch.tensor(reqs, dtype=torch.int32)), (12, 5), (3, 9)):
            arguments = (log_rho, slots, limits, costs(kind, rows, generator), base)
            assert choose(run, *arguments) == choose(references.choose_budget, *arguments)


@runs(choose_budget)
def test_equal_scores_go_to_the_lower_row(run) -> None:
    slots, limits = torch.tensor([2, 0, 1]), torch.full((3,), 4, dtype=torch.int32)
    cost = torch.full((3 + 6 + 1,), 1.0)  # room for 6 of the 12 nodes
    assert choose(run, torch.full((3, 4), -1.0), slots, limits, cost, 3) == [2, 0, 4]


@runs(choose_budget)
def test_worthless_nodes_are_not_verified(run) -> None:
    log_rho = torch.tensor([[-1.0, -27.0, -28.0, -100.0]])  # 2^-40 = exp(-27.7)
    slots, limits = torch.zeros(1, dtype=torch.int64), torch.tensor([4], dtype=torch.int32)
    assert choose(run, log_rho, slots, limits, torch.ones(9), 1) == [2]
    assert choose(run, log_rho - 30, slots, limits, torch.ones(9), 1) == [0]


@runs(choose_budget)
def test_ties_of_s_go_to_the_smaller_budget(run) -> None:
    # S is 1, then 1.25 for all budgets from 1 to 1,100: more than one round of the search
    log_rho = torch.full((1, 1100), -100.0)
    log_rho[0, 0] = math.log(0.25)
    slots, limits = torch.zeros(1, dtype=torch.int64), torch.tensor([1100], dtype=torch.int32)
    assert choose(run, log_rho, slots, limits, torch.ones(1200), 1) == [1]


@pytest.mark.parametrize("run", versions(choose_budget.triton, choose_budget.cpu))
def test_long_lists(run) -> None:
    generator = torch.Generator().manual_seed(4)
    log_rho = -0.001 * torch.rand(5, 300, generator=generator).cumsum(1)
    slots, limits = torch.arange(5), torch.full((5,), 300, dtype=torch.int32)
    for rows, more_than in ((700, 600), (1400, 1024), (2000, 1024)):  # the search goes by 1,024
        cost = costs("linear", rows, generator)
        arguments = (log_rho, slots, limits, cost, 5)
        expected = choose(references.choose_budget, *arguments)
        assert choose(run, *arguments) == expected
        assert sum(expected) > more_than


@runs(choose_budget)
def test_promised_is_the_sum_over_the_chosen(run) -> None:
    generator = torch.Generator().manual_seed(6)
    for reqs, limit in ((1, 1), (4, 23), (9, 16)):
        log_rho = scores(reqs + 2, limit, generator)
        slots = torch.randperm(reqs + 2, generator=generator)[:reqs]
        slots[1:][torch.rand(reqs - 1, generator=generator) < 0.3] = -1
        limits = torch.randint(-1, limit + 9, (reqs + 2,), generator=generator).int()
        arguments = (log_rho, slots, limits, costs("linear", 200, generator), reqs)
        counts, promised = choose_and_promise(run, *arguments)
        want_counts, want_promised = choose_and_promise(references.choose_budget, *arguments)
        assert counts == want_counts
        for slot, count in enumerate(counts):
            if slot in slots.tolist():
                rho = log_rho[slot, :count].double().exp().sum()
                # 2^-40 a node, and the rounding to fp32
                tolerance = count * 2**-40 + float(rho) * 2**-24
                torch.testing.assert_close(promised[slot].double(), rho, rtol=0, atol=tolerance)
            else:
                assert promised[slot].isnan()
        if DEVICE.type == "cpu":  # elsewhere exp may differ in its last bit
            assert_same(promised, want_promised)


@pytest.mark.thorough
@pytest.mark.parametrize("run", versions(take_best.triton, take_best.cpu))
@pytest.mark.parametrize(
    "kind",
    [
        "ties",
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in ("continuous", "far below 2^-40", "nothing")
        ),
    ],
)
def test_the_best_are_taken(run, kind: str) -> None:
    generator = torch.Generator().manual_seed(7)
    for reqs, limit in ((1, 1), (1, 9), (3, 5), (6, 13), (19, 4)):
        log_rho = scores(reqs + 2, limit, generator, ties=kind == "ties")
        if kind == "far below 2^-40":
            log_rho = 50 * log_rho - 1000
        if kind == "nothing":
            log_rho.fill_(-math.inf)
        log_rho = torch.cat([log_rho, torch.ones(reqs + 2, 3)], 1)[:, :limit]
        slots = torch.randperm(reqs + 2, generator=generator)[:reqs]
        slots[1:][torch.rand(reqs - 1, generator=generator) < 0.3] = -1
        limits = torch.randint(-1, limit + 3, (reqs + 2,), generator=generator).int()
        room = int(limits[slots[slots >= 0]].clamp(0, limit).sum())
        for total in {0, 1, room // 3, max(room - 1, 0), room, room + 1, 2**40}:
            counts = take(run, log_rho, slots, limits, total)
            assert counts == take(references.take_best, log_rho, slots, limits, total)
            assert sum(counts[slot] for slot in slots.tolist() if slot >= 0) == min(total, room)


@pytest.mark.slow
@pytest.mark.parametrize("run", versions(take_best.triton, take_best.cpu))
@pytest.mark.parametrize("total", [17, 300])
def test_take_best_of_many_requests(run, total: int) -> None:
    generator = torch.Generator().manual_seed(8)
    reqs, limit = 70, 16  # several rounds of rivals
    log_rho = scores(reqs, limit, generator, ties=True)
    slots = torch.randperm(reqs, generator=generator)
    slots[::9] = -1
    limits = torch.full((reqs,), limit, dtype=torch.int32)
    counts = take(run, log_rho, slots, limits, total)
    assert counts == take(references.take_best, log_rho, slots, limits, total)


@runs(take_best)
def test_no_rows_to_take_from(run) -> None:
    for slots in (torch.zeros(0, dtype=torch.int64), torch.tensor([-1, -1])):
        limits = torch.full((2,), 3, dtype=torch.int32)
        assert take(run, torch.zeros(2, 3), slots, limits, 4) == [-7777, -7777]


@runs(choose_budget)
def test_no_requests(run) -> None:
    nothing = (torch.zeros(2, 3), torch.zeros(0, dtype=torch.int64), torch.zeros(2).int())
    assert choose(run, *nothing, torch.ones(4), 0) == [-7777, -7777]


def test_full_size() -> None:
    """The compiled kernels: hours in the interpreter."""
    kind = "triton" if DEVICE.type == "cuda" else "cpu"
    choose_run, take_run = getattr(choose_budget, kind), getattr(take_best, kind)
    generator = torch.Generator().manual_seed(5)
    log_rho, slots = scores(64, 512, generator), torch.randperm(64, generator=generator)
    limits = torch.randint(0, 513, (64,), generator=generator).int()
    for kind in ("linear", "staircase", "random"):
        arguments = (log_rho, slots, limits, costs(kind, 40_000, generator), 64)
        expected = choose(references.choose_budget, *arguments)
        assert choose(choose_run, *arguments) == expected
    for total in (1, 5_000, 20_000):
        expected = take(references.take_best, log_rho, slots, limits, total)
        assert take(take_run, log_rho, slots, limits, total) == expected


def test_wrong_arguments_are_named() -> None:
    log_rho, slots, limits = torch.zeros(2, 3), torch.zeros(1).long(), torch.zeros(2).int()
    out, cost = torch.full((2,), -1).int(), torch.ones(4)
    scores = log_rho, slots, limits
    long, wide = torch.tensor(1), torch.zeros(3)
    refuses(r"base_rows must be torch\.int32", choose_budget, *scores, cost, long, out)
    refuses(r"promised must have shape \[2\]", choose_budget, *scores, cost, 1, out, wide)
    refuses("total must be at least 0, got -1", take_best, *scores, limits, -1, out, out, out)
    refuses("rows_start must have room for 2", take_best, *scores, limits, 1, out, out[:1], out)
    choose_budget(*scores, cost, 1, out)
    assert_same(out, torch.tensor([0, -1], dtype=torch.int32))
