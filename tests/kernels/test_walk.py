# SPDX-License-Identifier: Apache-2.0
"""Acceptance walks, the lazy one too, against their reference."""

from __future__ import annotations

import pytest
import torch
from op_helpers import assert_same, call, poisoned, runs, shaped_parents
from torch import Tensor

from bastion_kernels import accept_path
from bastion_kernels.accept.walk import AcceptPath
from bastion_kernels.cpu.walk import accept_lazily
from tests import references


def accept(run, sampled, fed, parents, slots, starts, depth) -> tuple[Tensor, ...]:
    """Run into slices of poisoned outputs and return the results."""
    reqs = len(slots)
    path, tokens = (poisoned(reqs, depth + 4, dtype=t) for t in (torch.int32, torch.int64))
    count = poisoned(reqs + 2, dtype=torch.int32)
    out = path[:, : depth + 1], tokens[:, : depth + 1], count[:reqs]
    call(run, sampled, fed, parents, slots, starts, *out)
    for beyond in (path[:, depth + 1 :], tokens[:, depth + 1 :], count[reqs:]):
        assert beyond.eq(-7777).all()
    return out


@runs(accept_path)
@pytest.mark.parametrize("depth", [16, 2])
def test_a_whole_chain_is_accepted_up_to_the_outputs_width(run, depth: int) -> None:
    fed = torch.arange(100, 117)
    parents, slots = torch.arange(16, dtype=torch.int32)[None], torch.tensor([0])
    starts = torch.tensor([0, 17], dtype=torch.int32)
    path, tokens, count = accept(run, fed + 1, fed, parents, slots, starts, depth)
    assert path[0].tolist() == list(range(depth + 1))
    assert tokens[0].tolist() == list(range(101, 102 + depth))
    assert count.item() == depth + 1


@runs(accept_path)
def test_inert_rows_and_stale_columns(run) -> None:
    # Row 0 is inert although it has logits rows; row 1 verifies 1 of its tree's 3 nodes, and the
    # token of a node that is not verified must not count, nor may the next request's rows.
    parents = torch.tensor([[0, 0, 1]], dtype=torch.int32)
    fed = torch.tensor([1, 2, 9, 5, 6, 6])
    sampled = torch.tensor([2, 2, 6, 7, 8, 8])
    starts = torch.tensor([0, 2, 4, 6], dtype=torch.int32)
    path, tokens, count = accept(run, sampled, fed, parents, torch.tensor([-1, 0, -1]), starts, 2)
    assert count.tolist() == [0, 1, 0]
    assert path.tolist() == [[-1, -1, -1], [0, -1, -1], [-1, -1, -1]]
    assert tokens.tolist() == [[0, 0, 0], [6, 0, 0], [0, 0, 0]]


@runs(accept_path)
def test_rejected_rows_and_sources_are_counted(run) -> None:
    # Four nodes of which two are accepted, an inert request, no row, and a request cut to one node.
    parents = torch.tensor([[0, 1, 1, 3, 4], [0, 1, 2, 3, 4], [0, 0, 1, 1, 1]], dtype=torch.int32)
    sources = torch.tensor([[3, 1, 2, 2, 0], [1, 1, 1, 1, 1], [1, 3, 2, 1, 1]], dtype=torch.int32)
    slots, starts = torch.tensor([0, -1, 1, 2]), torch.tensor([0, 5, 8, 8, 10], dtype=torch.int32)
    fed = torch.tensor([9, 1, 2, 3, 4, 9, 1, 2, 9, 1])
    sampled = torch.tensor([1, 3, 9, 9, 9, 1, 2, 9, 1, 9])
    path, count = poisoned(4, 5, dtype=torch.int32), poisoned(4, dtype=torch.int32)
    rejected, counts = poisoned(4, dtype=torch.int32), poisoned(4, 2, 3, dtype=torch.int32)
    call(
        run, sampled, fed, parents, slots, starts, path, path.long(), count, rejected, sources,
        counts,
    )  # fmt: skip
    assert count.tolist() == [3, 0, 0, 2] and rejected.tolist() == [2, 3, 0, 0]
    nothing = [[0, 0, 0], [0, 0, 0]]
    assert counts.tolist() == [[[1, 2, 1], [0, 1, 1]], nothing, nothing, [[1, 0, 0], [1, 0, 0]]]


@runs(accept_path)
def test_no_requests(run) -> None:
    none, parents = torch.zeros(0, dtype=torch.int64), torch.zeros(1, 3, dtype=torch.int32)
    assert len(accept(run, none, none, parents, none, torch.zeros(1).int(), 2)[2]) == 0


class Batch:
    """Random trees, cut anywhere, with draws that follow the tree more often than not."""

    def __init__(self, seed: int) -> None:
        generator, slots_total = torch.Generator().manual_seed(seed), 7

        def integers(high: int, *shape: int) -> Tensor:
            return torch.randint(0, high, shape, generator=generator)

        # Parents come before their children; stale columns lie behind a request's rows.
        limit, shapes = (12, 37)[seed % 2], ("random", "random", "star", "chain")
        used = [shaped_parents(shapes[i % 4], limit, limit, generator) for i in range(slots_total)]
        parents = poisoned(slots_total, limit + 3, dtype=torch.int32)[:, :limit]
        parents[:] = torch.tensor(used)
        reqs = int(integers(5, 1)) + 1
        slots = torch.randperm(slots_total, generator=generator)[:reqs]
        slots[torch.rand(reqs, generator=generator) < 0.15] = -1
        tails = integers(limit + 2, reqs)  # no row, a lone root, a part of the tree, all of it
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), tails.cumsum(0)]).int()
        total = int(starts[-1])
        self.sampled = integers(4, total)
        fed = integers(4, total)  # few tokens, so equal siblings
        for r, tail in enumerate(tails.tolist()):
            root = int(starts[r])
            for node in range(1, tail):
                if slots[r] >= 0 and torch.rand((), generator=generator) < 0.6:
                    above = int(parents[slots[r], node - 1])
                    fed[root + node] = self.sampled[root + above]
        self.trees, self.depth = (fed, parents, slots, starts), (5, 20)[seed % 2]

    def walk(self, run, first: Tensor) -> tuple[Tensor, ...]:
        return accept(run, first, *self.trees, self.depth)


@runs(accept_path, accept_path)
def test_walks_of_random_batches(run) -> None:
    longest = 0
    for seed in range(24):
        batch = Batch(seed)
        expected = batch.walk(references.accept_path, batch.sampled)
        assert_same(batch.walk(run, batch.sampled), expected)
        longest = max(longest, int(expected[2].max()))
    assert longest > 4


@pytest.mark.parametrize("seed", range(40))
def test_the_lazy_walk_takes_the_eager_ones_path_and_draws_nowhere_else(seed: int) -> None:
    batch, asked = Batch(seed), list[int]()

    def draw(rows: Tensor) -> Tensor:
        asked.extend(rows.tolist())
        return batch.sampled[rows]

    def lazily_cpu(_, *given) -> None:
        accept_lazily(draw, AcceptPath(batch.sampled, *given))

    eager = batch.walk(references.accept_path, batch.sampled)
    assert_same(batch.walk(lazily_cpu, batch.sampled), eager)
    starts, paths = batch.trees[3].tolist(), eager[0].tolist()
    visited = [starts[r] + node for r, path in enumerate(paths) for node in path if node >= 0]
    assert sorted(asked) == sorted(visited)
