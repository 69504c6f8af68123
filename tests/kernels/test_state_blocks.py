# SPDX-License-Identifier: Apache-2.0
"""Where the states of a step are, against the rule request by request."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_helpers import DEVICE, POISON, assert_same, poisoned, refuses, versions
from torch import Tensor

from bastion_kernels.gated_delta.blocks import StateBlocks, find_commits, find_states
from tests import references

SIZE, COLUMNS = 4, (5, 7)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def tables(reqs: int) -> list[Tensor]:
    """Block tables of two groups, every block another, in longer rows."""
    made = []
    for group, columns in enumerate(COLUMNS):
        ids = 1000 * group + torch.arange(reqs * (columns + 3), dtype=torch.int32)
        made.append(ids.to(DEVICE).view(reqs, columns + 3)[:, :columns])
    return made


def buffers(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [poisoned(*shape, dtype=torch.int32).to(DEVICE) for shape in shapes]


@pytest.mark.parametrize("run", versions(find_states.triton, find_states.cpu))
@pytest.mark.parametrize("size", [0, SIZE])
@pytest.mark.parametrize("decodes", [None, [True, False, True, True, True, True]])
def test_a_step_starts_from_the_states_after_the_tokens_before_it(
    run: Any, size: int, decodes: list[bool] | None
) -> None:
    """Decodes, a prompt, a request at a block's end, one beyond all columns, and padding."""
    rows, before, most = [3, 5, 1, 2, 9, 0], [6, 0, 8, 3, 99, 0], 9
    limit = sum(rows[:4]) - (0 if decodes is None else 5) + 8  # the next ends one row beyond
    given = (
        ints(0, *torch.tensor(rows).cumsum(0).tolist()),
        ints(*(n + c for n, c in zip(rows, before, strict=True))),
        None if decodes is None else torch.tensor(decodes, device=DEVICE),
        StateBlocks(tables(most), size),
        limit,
    )
    got, expected = (buffers((most + 1,), (most,), (2, most)) for _ in range(2))
    run(*given, *got)
    references.find_states(*given, *expected)
    assert_same(got, expected)
    assert got[1].tolist() == [*before, *[POISON] * 3]
    assert got[2][0, 0] == tables(most)[0][0, 1 if size else 0]
    assert got[2][:, 4].tolist() == [-1, -1]


@pytest.mark.parametrize("run", versions(find_commits.triton, find_commits.cpu))
def test_a_path_writes_at_its_end_and_where_a_block_ends_within(run: Any) -> None:
    """Every number of tokens before a step, and every length of the path, side by side."""
    longest = 4
    cases = [(c, n) for c in range(1, 2 * SIZE + 1) for n in range(longest + 1)]
    reqs = len(cases)
    path = torch.full((reqs, longest + 1), -1, dtype=torch.int32)
    for r, (_, length) in enumerate(cases):
        path[r, :length] = 2 * torch.arange(length)  # every other row of a tree
    given = ints(*(c for c, _ in cases)), path.to(DEVICE), StateBlocks(tables(reqs), SIZE)
    # slices of longer buffers
    got, expected = (buffers((2, 2, reqs + 3), (2, reqs + 3)) for _ in range(2))
    for made, version in ((got, run), (expected, references.find_commits)):
        version(*given, made[0][..., :reqs], made[1][:, :reqs])
    assert_same(got, expected)
    assert int((got[0][1, 0, :reqs] >= 0).sum()) == 12


def test_refusals_name_the_argument() -> None:
    held = StateBlocks(tables(2), SIZE)
    starts, two = ints(0, 1, 2), ints(1, 1)
    rest = (held, 9, starts, two, ints(0, 0).repeat(2, 1))
    refuses("decodes must be torch.bool", find_states, starts, two, two, *rest)
    refuses("seq_lens must be torch.int32", find_states, starts, two.long(), None, *rest)
    short = (held, 9, starts[:2], two[:1], ints(0).repeat(2, 1))
    refuses("starts must have shape", find_states, starts, two, None, *short)
    path, into, lengths = starts[None].repeat(2, 1), two.repeat(2, 2, 1), two.repeat(2, 1)
    refuses("lengths must have shape", find_commits, two, path, held, into, two[None])
    one_state = StateBlocks(tables(2), 0)
    refuses("writes where it reads", find_commits, two, path, one_state, into, lengths)
