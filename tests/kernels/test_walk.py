# SPDX-License-Identifier: Apache-2.0
"""Acceptance walks against the definition of an accepted node; the greedy and the lazy one too."""

from __future__ import annotations

import pytest
import torch
from op_helpers import call, depths_of, poisoned, refuses, runs, shaped_parents
from torch import Tensor

from bastion_kernels import accept_path
from bastion_kernels.cpu.walk import GREEDY_DTYPES, accept_greedily, accept_lazily
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


def accepted(sampled: list[int], fed: list[int], parents: list[int]) -> list[int]:
    """The accepted nodes: those whose every step from the root is what its parent sampled."""
    committed = {0}
    for node in range(1, len(fed)):
        parent = parents[node - 1]
        taken_before = any(
            parents[other - 1] == parent and fed[other] == fed[node] for other in range(1, node)
        )
        if parent in committed and fed[node] == sampled[parent] and not taken_before:
            committed.add(node)
    return sorted(committed)


class Batch:
    """Random trees with random draws that follow the tree more often than not."""

    def __init__(self, shapes: list[tuple[str, int, int]], limit: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        slots = torch.randperm(len(shapes) + 2, generator=generator)[: len(shapes)]
        self.parents = poisoned(len(shapes) + 2, limit + 3, dtype=torch.int32)[:, :limit]
        self.slots, starts, fed, sampled = slots, [0], [], []
        self.requests: list[tuple[list[int], list[int], list[int]]] = []
        for (shape, used, rows), slot in zip(shapes, slots.tolist(), strict=True):
            parents = shaped_parents(shape, limit, used, generator)
            self.parents[slot] = torch.tensor(parents, dtype=torch.int32)
            tokens = torch.randint(0, 4 if rows < 9 else 50, (rows,), generator=generator)
            draws = tokens[torch.randint(0, max(rows, 1), (rows,), generator=generator)]
            for node in range(1, rows):  # half of all nodes draw their own child's token
                if torch.rand((), generator=generator) < 0.5:
                    draws[parents[node - 1]] = tokens[node]
            self.requests.append((draws.tolist(), tokens.tolist(), parents))
            fed.append(tokens)
            sampled.append(draws)
            starts.append(starts[-1] + rows)
        self.fed, self.sampled = torch.cat(fed), torch.cat(sampled)
        self.starts = torch.tensor(starts, dtype=torch.int32)
        self.depth = max((max(depths_of(parents), default=0) for *_, parents in self.requests))

    def check(self, run) -> None:
        for node_ids in (self.fed, self.fed.int()):
            inputs = (self.sampled, node_ids, self.parents, self.slots, self.starts, self.depth)
            path, tokens, count = accept(run, *inputs)
            for row, (draws, fed, parents) in enumerate(self.requests):
                expected = accepted(draws, fed, parents) if fed else []
                padding = self.depth + 1 - len(expected)
                assert path[row].tolist() == expected + [-1] * padding
                assert tokens[row].tolist() == [draws[node] for node in expected] + [0] * padding
                assert count[row].item() == len(expected)


@runs(accept_path, accept_path)
def test_hostile_shapes(run) -> None:
    shapes = [
        ("chain", 16, 17),
        ("star", 37, 38),
        ("random", 37, 38),
        ("random", 37, 12),  # only a part of the tree is verified
        ("random", 37, 1),  # plain decoding
        ("chain", 0, 1),
        ("random", 20, 0),  # no logits rows at all
        *(("random", 8, rows) for rows in range(2, 10)),  # few tokens, so equal siblings
    ]
    for seed in range(3):
        Batch(shapes, 37, seed).check(run)


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
def test_no_requests(run) -> None:
    none, parents = torch.zeros(0, dtype=torch.int64), torch.zeros(1, 3, dtype=torch.int32)
    assert len(accept(run, none, none, parents, none, torch.zeros(1).int(), 2)[2]) == 0


def test_wrong_arguments_are_named() -> None:
    tokens, parents = torch.zeros(4, dtype=torch.int64), torch.zeros(1, 3, dtype=torch.int32)
    slots, starts = torch.zeros(1, dtype=torch.int64), torch.tensor([0, 4], dtype=torch.int32)
    rest = parents, slots, starts, torch.zeros(1, 3).int(), torch.zeros(1, 3).long(), slots.int()
    refuses(r"node_ids must have shape \[4\], got \[3\]", accept_path, tokens, tokens[:3], *rest)
    refuses(r"sampled must be torch\.int64", accept_path, tokens.int(), tokens, *rest)


@pytest.mark.parametrize("dtype", GREEDY_DTYPES)
@pytest.mark.parametrize("seed", range(40))
def test_the_greedy_and_the_lazy_walk_take_the_eager_ones_path(
    seed: int, dtype: torch.dtype
) -> None:
    """The lazy one draws nowhere else."""
    generator, slots_total, nodes, depth = torch.Generator().manual_seed(seed), 7, 12, 5

    def integers(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=generator)

    reqs = int(integers(5, 1)) + 1
    slots = torch.randperm(slots_total, generator=generator)[:reqs]
    slots[torch.rand(reqs, generator=generator) < 0.15] = -1
    # Parents come before their children; stale columns lie behind a request's rows.
    parents = torch.stack([integers(column + 1, slots_total) for column in range(nodes)], 1).int()
    tails = integers(nodes + 2, reqs)  # no row, a lone root, a part of the tree, all of it
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
    batch, asked = (fed, parents, slots, starts), list[int]()

    def draw(rows: Tensor) -> Tensor:
        asked.extend(rows.tolist())
        return sampled[rows]

    shape = (reqs, depth + 1)
    eager, greedy, lazy = (
        (torch.full(shape, 9).int(), torch.full(shape, 9), torch.full((reqs,), 9).int())
        for _ in range(3)
    )
    references.accept_path(sampled, *batch, *eager)
    accept_greedily(logits, *batch, *greedy)
    accept_lazily(draw, *batch, *lazy)
    for expected, one, other in zip(eager, greedy, lazy, strict=True):
        assert torch.equal(expected, one) and torch.equal(expected, other)
    paths = enumerate(eager[0].tolist())
    visited = [int(starts[r]) + node for r, path in paths for node in path if node >= 0]
    assert sorted(asked) == sorted(visited)
