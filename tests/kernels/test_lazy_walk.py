# SPDX-License-Identifier: Apache-2.0
"""The lazy walk takes the path of the eager one, and draws nowhere else."""

from __future__ import annotations

import pytest
import torch

from bastion_kernels import accept_path
from bastion_kernels.cpu.walk import accept_lazily

SLOTS, NODES, DEPTH = 7, 12, 5


@pytest.mark.parametrize("seed", range(40))
def test_it_walks_as_the_eager_one_and_draws_only_on_its_way(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def integers(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator)

    reqs = int(integers(5, 1)) + 1
    slots = torch.randperm(SLOTS, generator=generator)[:reqs]
    slots[torch.rand(reqs, generator=generator) < 0.15] = -1
    # Parents come before their children; stale columns lie behind a request's rows.
    parents = torch.stack([integers(column + 1, SLOTS) for column in range(NODES)], 1).int()
    tails = integers(NODES + 2, reqs)  # no row, a lone root, a part of the tree, all of it
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), tails.cumsum(0)]).int()
    total = int(starts[-1])
    fed, sampled = integers(4, total), integers(4, total)

    def outputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        shape = (reqs, DEPTH + 1)
        return torch.full(shape, 9).int(), torch.full(shape, 9), torch.full((reqs,), 9).int()

    eager, lazy = outputs(), outputs()
    accept_path.reference(sampled, fed, parents, slots, starts, *eager)
    asked: list[int] = []

    def draw(rows: torch.Tensor) -> torch.Tensor:
        asked.extend(rows.tolist())
        return sampled[rows]

    accept_lazily(draw, fed, parents, slots, starts, *lazy)
    for left, right in zip(eager, lazy, strict=True):
        assert torch.equal(left, right)
    visited = [
        int(starts[r]) + node
        for r, path in enumerate(eager[0].tolist())
        for node in path
        if node >= 0
    ]
    assert sorted(asked) == sorted(visited)
