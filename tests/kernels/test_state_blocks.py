# SPDX-License-Identifier: Apache-2.0
"""Where the states of a step are, against the rule request by request."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_helpers import DEVICE, refuses, runs
from torch import Tensor

from bastion_kernels.gated_delta.blocks import StateBlocks, find_commits, find_states
from tests.references.state_blocks import block_after

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


@runs(find_states)
@pytest.mark.parametrize("size", [0, SIZE])
@pytest.mark.parametrize("decodes", [None, [True, False, True, True, True, True]])
def test_a_step_starts_from_the_states_after_the_tokens_before_it(
    run: Any, size: int, decodes: list[bool] | None
) -> None:
    """Decodes, a prompt, a request at a block's end, one beyond all columns, and padding."""
    rows, before = [3, 5, 1, 2, 9, 0], [6, 0, 8, 3, 99, 0]
    reqs, most = len(rows), 9
    given = tables(most)
    starts, computed = torch.full((most + 1,), 77).int(), torch.full((most,), 77).int()
    state_rows = torch.full((2, most), 77, dtype=torch.int32).to(DEVICE)
    starts, computed = starts.to(DEVICE), computed.to(DEVICE)
    mine = [n if decodes is None or decodes[r] else 0 for r, n in enumerate(rows)]
    limit = sum(mine[:4]) + 8  # the next request ends one row beyond
    run(
        ints(0, *torch.tensor(rows).cumsum(0).tolist()),
        ints(*(n + c for n, c in zip(rows, before, strict=True))),
        None if decodes is None else torch.tensor(decodes, device=DEVICE),
        StateBlocks(given, size),
        limit,
        starts,
        computed,
        state_rows,
    )
    assert starts.tolist() == [0, *torch.tensor(mine).cumsum(0).tolist(), *[77] * 3]
    assert computed.tolist() == [*before, *[77] * 3]
    for group, table in enumerate(given):
        for r in range(reqs):
            held = mine[r] > 0 and sum(mine[: r + 1]) <= limit
            expected = block_after(table, r, before[r], size) if held else -1
            assert int(state_rows[group, r]) == expected
        assert state_rows[group, reqs:].tolist() == [77] * 3
    assert mine[4] > 0
    assert int(state_rows[0, 4]) == -1


@runs(find_commits)
def test_a_path_writes_at_its_end_and_where_a_block_ends_within(run: Any) -> None:
    """Every number of tokens before a step, and every length of the path, side by side."""
    longest = 4
    cases = [(c, n) for c in range(1, 2 * SIZE + 1) for n in range(longest + 1)]
    reqs, given = len(cases), tables(len(cases))
    path = torch.full((reqs, longest + 1), -1, dtype=torch.int32)
    for r, (_, length) in enumerate(cases):
        path[r, :length] = 2 * torch.arange(length)  # every other row of a tree
    # slices of longer buffers
    into = torch.full((2, 2, reqs + 3), 77, dtype=torch.int32, device=DEVICE)
    lengths = torch.full((2, reqs + 3), 77, dtype=torch.int32, device=DEVICE)
    run(
        ints(*(before for before, _ in cases)),
        path.to(DEVICE),
        StateBlocks(given, SIZE),
        into[..., :reqs],
        lengths[:, :reqs],
    )
    crossed = 0
    for r, (before, length) in enumerate(cases):
        inner = [c for c in range(before + 1, before + length) if c % SIZE == 0]
        crossed += len(inner)
        assert int(lengths[0, r]) == length
        if inner:
            assert int(lengths[1, r]) == inner[0] - before
        for group, table in enumerate(given):
            assert int(into[0, group, r]) == block_after(table, r, before + length, SIZE)
            expected = block_after(table, r, inner[0], SIZE) if inner else -1
            assert int(into[1, group, r]) == expected
    assert crossed == 12
    assert bool((into[..., reqs:] == 77).all())
    assert bool((lengths[:, reqs:] == 77).all())


def test_refusals_name_the_argument() -> None:
    held = StateBlocks(tables(2), SIZE)
    starts, two = ints(0, 1, 2), ints(1, 1)
    rest = (held, 9, starts, two, ints(0, 0).repeat(2, 1))
    refuses("decodes must be torch.bool", find_states, starts, two, two, *rest)
    refuses("seq_lens must be torch.int32", find_states, starts, two.long(), None, *rest)
    short = (held, 9, starts[:2], two[:1], ints(0).repeat(2, 1))
    refuses("2 requests do not fit starts", find_states, starts, two, None, *short)
    path, into, lengths = starts[None].repeat(2, 1), two.repeat(2, 2, 1), two.repeat(2, 1)
    refuses("lengths must have shape", find_commits, two, path, held, into, two[None])
    one_state = StateBlocks(tables(2), 0)
    refuses("writes where it reads", find_commits, two, path, one_state, into, lengths)
