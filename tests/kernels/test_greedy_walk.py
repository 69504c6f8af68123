# SPDX-License-Identifier: Apache-2.0
"""The greedy walk takes the path of the eager one over every row's argmax."""

from __future__ import annotations

import pytest
import torch

from bastion_kernels import accept_path
from bastion_kernels.cpu.walk import GREEDY_DTYPES, accept_greedily

SLOTS, NODES, DEPTH = 7, 12, 5


@pytest.mark.parametrize("dtype", GREEDY_DTYPES)
@pytest.mark.parametrize("seed", range(30))
def test_it_walks_as_the_eager_one(seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)

    def integers(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator)

    reqs = int(integers(5, 1)) + 1
    slots = torch.randperm(SLOTS, generator=generator)[:reqs]
    slots[torch.rand(reqs, generator=generator) < 0.15] = -1
    parents = torch.stack([integers(column + 1, SLOTS) for column in range(NODES)], 1).int()
    tails = integers(NODES + 2, reqs)
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

    def outputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        shape = (reqs, DEPTH + 1)
        return torch.full(shape, 9).int(), torch.full(shape, 9), torch.full((reqs,), 9).int()

    eager, greedy = outputs(), outputs()
    accept_path.reference(sampled, fed, parents, slots, starts, *eager)
    accept_greedily(logits, fed, parents, slots, starts, *greedy)
    for left, right in zip(eager, greedy, strict=True):
        assert torch.equal(left, right)
