# SPDX-License-Identifier: Apache-2.0
"""Ancestor bits against a dense closure of the parent relation, positions against a loop."""

from __future__ import annotations

import pytest
import torch
from op_helpers import (
    POISON,
    assert_same,
    call,
    depths_of,
    poisoned,
    random_parents,
    runs,
    shaped_parents,
    versions,
)
from torch import Tensor

from bastion_kernels import ancestor_bits, tree_positions


def unpack(bits: Tensor, nodes: int) -> Tensor:
    """`[.., nodes, W]` int32 to `[.., nodes, nodes]` bool; bits past the nodes must be zero."""
    shifts = torch.arange(32)
    dense = ((bits.long()[..., None] >> shifts) & 1).bool().flatten(-2)
    assert not dense[..., nodes:].any()
    return dense[..., :nodes]


def closure(parents: list[int]) -> Tensor:
    """[i, j] = node j is an ancestor of node i or i itself, from powers of the parent relation."""
    nodes = len(parents) + 1
    step = torch.eye(nodes)
    for column, parent in enumerate(parents):
        if parent >= 0:
            step[column + 1, parent] = 1
        else:
            step[column + 1, column + 1] = 0
    reach = step
    for _ in range(nodes.bit_length()):
        reach = ((reach @ reach) > 0).float()
    return reach.bool()


def mask(run, parents: Tensor, slots: Tensor) -> Tensor:
    limit = parents.shape[1]
    out = poisoned(len(parents), limit + 2, limit // 32 + 3, dtype=torch.int32)
    call(run, parents, slots, out[:, : limit + 1, : limit // 32 + 1])
    assert out[:, limit + 1 :].eq(POISON).all() and out[:, :, limit // 32 + 1 :].eq(POISON).all()
    return out[:, : limit + 1, : limit // 32 + 1]


@runs(ancestor_bits, ancestor_bits)
@pytest.mark.parametrize("shape", ["chain", "star", "random"])
@pytest.mark.parametrize("size", [(1, 1), (1, 0), (31, 31), (32, 20), (64, 64), (77, 70)])
def test_bits(run, shape: str, size: tuple[int, int]) -> None:
    limit, used = size
    generator = torch.Generator().manual_seed(limit)
    rows = [shaped_parents(shape, limit, used, generator) for _ in range(4)]
    parents = torch.tensor(rows, dtype=torch.int32)
    out = mask(run, parents, torch.tensor([3, -1, 1]))
    for slot in (1, 3):
        assert_same(unpack(out[slot], limit + 1), closure(rows[slot]))
    assert out[[0, 2]].eq(POISON).all()


@pytest.mark.parametrize("run", versions(ancestor_bits.triton, ancestor_bits.cpu))
def test_bits_of_damaged_parents_terminate(run) -> None:
    parents = torch.tensor([[5, 2, 3, 1, 2_000_000, -9, 0, 7]], dtype=torch.int32)
    out = mask(run, parents, torch.tensor([0]))
    assert unpack(out[0], 9)[7].nonzero().flatten().tolist() == [0, 7]


@runs(tree_positions, tree_positions)
@pytest.mark.parametrize("in_place", [False, True])
def test_positions(run, in_place: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    limit = 40
    rows = [random_parents(limit, limit, generator) for _ in range(9)]
    depths = torch.tensor([[*depths_of(row), 99] for row in rows], dtype=torch.int32)[:, :limit]
    # slot, rows of the request, rows of its tail: tree, prefill, prefill + tree, plain decoding,
    # inert, empty and no tail at all
    batch = [(4, 41, 41), (2, 300, 1), (8, 30, 9), (0, 1, 1), (-1, 7, 7), (5, 0, 0), (1, 5, 0)]
    batch += [(3, 17, 17), (-1, 0, 0)]
    starts, expected = [0], []
    positions = []
    for request, (slot, length, tail) in enumerate(batch):
        first = 1000 * request
        positions += range(first, first + length)
        root = first + length - tail
        nodes = [0, *depths_of(rows[slot])][:tail] if slot >= 0 else range(tail)
        expected += [*range(first, root), *(root + depth for depth in nodes)]
        starts.append(starts[-1] + length)
    positions, expected = positions + [POISON] * 6, expected + [POISON] * 6  # padding rows
    source = torch.tensor(positions)
    out = source if in_place else poisoned(len(positions), dtype=torch.int64)
    slots = torch.tensor([slot for slot, _, _ in batch])
    tails = [tail for _, _, tail in batch]
    ends = (torch.tensor(x, dtype=torch.int32) for x in (starts, tails))
    call(run, source, depths, slots, *ends, out)
    assert out.tolist() == expected
    assert in_place or source.tolist() == positions


def test_nothing_to_do() -> None:
    none, one = torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    parents = torch.zeros(2, 3, dtype=torch.int32)
    for run in versions(tree_positions.triton, tree_positions.cpu):
        call(run, none, parents, none, one, one[:0], none.clone())
    for run in versions(ancestor_bits.triton, ancestor_bits.cpu):
        assert mask(run, parents, none).eq(POISON).all()
