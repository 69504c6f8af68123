# SPDX-License-Identifier: Apache-2.0
"""The acceptance walk against the definition of an accepted node, and the kernel against both."""

from __future__ import annotations

import pytest
import torch
from op_helpers import (
    CHAIN,
    RANDOM,
    STAR,
    assert_same,
    depths_of,
    moved,
    poisoned,
    runs,
    shaped_parents,
    versions,
    versions_of,
)
from torch import Tensor

from bastion_kernels import accept_path


def accept(run, sampled, fed, parents, slots, starts, depth, device) -> tuple[Tensor, ...]:
    """Run into slices of poisoned outputs and return the results, on the CPU."""
    reqs = len(slots)
    out = (
        poisoned(reqs, depth + 4, dtype=torch.int32).to(device),
        poisoned(reqs, depth + 4, dtype=torch.int64).to(device),
        poisoned(reqs + 2, dtype=torch.int32).to(device),
    )
    inputs = (moved(tensor, device) for tensor in (sampled, fed, parents, slots, starts))
    run(*inputs, out[0][:, : depth + 1], out[1][:, : depth + 1], out[2][:reqs])
    for tensor in (out[0][:, depth + 1 :], out[1][:, depth + 1 :], out[2][reqs:]):
        assert tensor.eq(-7777).all()
    return out[0][:, : depth + 1].cpu(), out[1][:, : depth + 1].cpu(), out[2][:reqs].cpu()


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

    def check(self, run, device: torch.device) -> None:
        inputs = (self.sampled, self.fed, self.parents, self.slots, self.starts, self.depth)
        path, tokens, count = accept(run, *inputs, device)
        for row, (draws, fed, parents) in enumerate(self.requests):
            expected = accepted(draws, fed, parents) if fed else []
            padding = self.depth + 1 - len(expected)
            assert path[row].tolist() == expected + [-1] * padding
            assert tokens[row].tolist() == [draws[node] for node in expected] + [0] * padding
            assert count[row].item() == len(expected)


@runs(accept_path, accept_path)
def test_hostile_shapes(run, device: torch.device) -> None:
    shapes = [
        (CHAIN, 16, 17),
        (STAR, 37, 38),
        (RANDOM, 37, 38),
        (RANDOM, 37, 12),  # only a part of the tree is verified
        (RANDOM, 37, 1),  # plain decoding
        (CHAIN, 0, 1),
        (RANDOM, 20, 0),  # no logits rows at all
    ]
    for seed in range(3):
        Batch(shapes, 37, seed).check(run, device)


def test_random_trees(device: torch.device) -> None:
    for seed in range(200):
        shapes = [(RANDOM, 8, 1 + (seed + r) % 9) for r in range(5)]
        batch = Batch(shapes, 8, 100 + seed)
        for run in versions(accept_path.reference, accept_path.cpu):
            batch.check(run, device)
        if device.type == "cuda" or seed % 20 == 0:
            batch.check(accept_path.triton, device)


@runs(accept_path)
def test_whole_chain_is_accepted(run, device: torch.device) -> None:
    fed = torch.arange(100, 117)
    sampled = fed + 1
    parents = torch.arange(16, dtype=torch.int32)[None]
    slots, starts = torch.tensor([0]), torch.tensor([0, 17], dtype=torch.int32)
    path, tokens, count = accept(run, sampled, fed, parents, slots, starts, 16, device)
    assert path[0].tolist() == list(range(17))
    assert tokens[0].tolist() == list(range(101, 118))
    assert count.item() == 17


@runs(accept_path)
def test_inert_rows_and_stale_columns(run, device: torch.device) -> None:
    # Row 0 is inert although it has logits rows; row 1 verifies 1 of its tree's 3 nodes, and the
    # token of a node that is not verified must not count, nor may the next request's rows.
    parents = torch.tensor([[0, 0, 1]], dtype=torch.int32)
    fed = torch.tensor([1, 2, 9, 5, 6, 6])
    sampled = torch.tensor([2, 2, 6, 7, 8, 8])
    starts = torch.tensor([0, 2, 4, 6], dtype=torch.int32)
    slots = torch.tensor([-1, 0, -1])
    path, tokens, count = accept(run, sampled, fed, parents, slots, starts, 2, device)
    assert count.tolist() == [0, 1, 0]
    assert path.tolist() == [[-1, -1, -1], [0, -1, -1], [-1, -1, -1]]
    assert tokens.tolist() == [[0, 0, 0], [6, 0, 0], [0, 0, 0]]


@runs(accept_path)
def test_path_is_cut_at_the_outputs_width(run, device: torch.device) -> None:
    fed = torch.arange(6)
    parents = torch.arange(5, dtype=torch.int32)[None]
    slots, starts = torch.tensor([0]), torch.tensor([0, 6], dtype=torch.int32)
    path, tokens, count = accept(run, fed + 1, fed, parents, slots, starts, 2, device)
    assert (path[0].tolist(), tokens[0].tolist(), count.item()) == ([0, 1, 2], [1, 2, 3], 3)


def test_no_requests(device: torch.device) -> None:
    none, parents = torch.zeros(0, dtype=torch.int64), torch.zeros(1, 3, dtype=torch.int32)
    for run in versions_of(accept_path):
        start = torch.zeros(1, dtype=torch.int32)
        _, _, count = accept(run, none, none, parents, none, start, 2, device)
        assert_same(count, torch.zeros(0, dtype=torch.int32))


def test_wrong_arguments_are_named() -> None:
    tokens, parents = torch.zeros(4, dtype=torch.int64), torch.zeros(1, 3, dtype=torch.int32)
    slots, starts = torch.zeros(1, dtype=torch.int64), torch.tensor([0, 4], dtype=torch.int32)
    out = (torch.zeros(1, 3, dtype=torch.int32), torch.zeros(1, 3, dtype=torch.int64))
    count = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"node_ids must have shape \[4\], got \[3\]"):
        accept_path(tokens, tokens[:3], parents, slots, starts, *out, count)
    with pytest.raises(TypeError, match=r"sampled must be torch\.int64"):
        accept_path(tokens.int(), tokens, parents, slots, starts, *out, count)
