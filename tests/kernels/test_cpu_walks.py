# SPDX-License-Identifier: Apache-2.0
"""The greedy and the lazy walk take the path of the eager one; the lazy one draws nowhere else."""

from __future__ import annotations

import pytest
import torch

from bastion_kernels import accept_path
from bastion_kernels.cpu.walk import GREEDY_DTYPES, accept_greedily, accept_lazily

SLOTS, NODES, DEPTH = 7, 12, 5


@pytest.mark.parametrize("dtype", GREEDY_DTYPES)
@pytest.mark.parametrize("seed", range(40))
def test_they_walk_as_the_eager_one(seed: int, dtype: torch.dtype) -> None:
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
    total, vocab = int(starts[-1]), (4, 700, 1500)[seed % 3]
    # Few different values, so that many are equal; both zeros, infinities and NaNs among them.
    values = torch.tensor([-torch.inf, -2.0, -0.0, 0.0, 1.0, 3.0])[integers(6, total, vocab)]
    if seed % 2:
        values[torch.rand(total, vocab, generator=generator) < 0.3 / vocab] = torch.nan
        values[torch.rand(total, vocab, generator=generator) < 0.3 / vocab] = torch.inf
    logits = values.to(dtype)
    sampled = logits.argmax(1)
    fed = integers(4, total)
    follow = torch.rand(total, generator=generator) < 0.7
    fed[1:] = torch.where(follow[1:], sampled[:-1], fed[1:])
    batch = fed, parents, slots, starts
    asked: list[int] = []

    def draw(rows: torch.Tensor) -> torch.Tensor:
        asked.extend(rows.tolist())
        return sampled[rows]

    shape = (reqs, DEPTH + 1)
    eager, greedy, lazy = (
        (torch.full(shape, 9).int(), torch.full(shape, 9), torch.full((reqs,), 9).int())
        for _ in range(3)
    )
    accept_path.reference(sampled, *batch, *eager)
    accept_greedily(logits, *batch, *greedy)
    accept_lazily(draw, *batch, *lazy)
    for expected, one, other in zip(eager, greedy, lazy, strict=True):
        assert torch.equal(expected, one) and torch.equal(expected, other)
    paths = enumerate(eager[0].tolist())
    visited = [int(starts[r]) + node for r, path in paths for node in path if node >= 0]
    assert sorted(asked) == sorted(visited)
