# SPDX-License-Identifier: Apache-2.0
"""Shares of a step's nodes against full sorts, which are `references`."""

from __future__ import annotations

import math

import pytest
import torch
from op_helpers import assert_same, call, poisoned, runs, versions
from torch import Tensor

from bastion_kernels import take_best
from tests import references

VERSIONS = versions(take_best.triton, take_best.cpu)


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


@pytest.mark.thorough
@pytest.mark.parametrize("run", VERSIONS)
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


@runs(take_best)
def test_no_rows_to_take_from(run) -> None:
    for slots in (torch.zeros(0, dtype=torch.int64), torch.tensor([-1, -1])):
        limits = torch.full((2,), 3, dtype=torch.int32)
        assert take(run, torch.zeros(2, 3), slots, limits, 4) == [-7777, -7777]


@pytest.mark.parametrize(
    ("run", "reqs", "limit", "totals"),
    [
        # several rounds of rivals
        *(pytest.param(run, 70, 16, (17, 300), marks=pytest.mark.slow) for run in VERSIONS),
        # the compiled kernel: hours in the interpreter
        (VERSIONS[-1], 64, 512, (1, 5000, 20_000)),
    ],
)
def test_many_requests(run, reqs: int, limit: int, totals: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(8)
    log_rho = scores(reqs, limit, generator, ties=limit == 16)
    slots = torch.randperm(reqs, generator=generator)
    slots[::9] = -1
    limits = torch.randint(0, limit + 1, (reqs,), generator=generator).int()
    for total in totals:
        expected = take(references.take_best, log_rho, slots, limits, total)
        assert take(run, log_rho, slots, limits, total) == expected
