# SPDX-License-Identifier: Apache-2.0
"""Bound ops write what the ops themselves write, in the first call of a batch size and later."""

from __future__ import annotations

import pytest
import torch
from op_helpers import DEVICE, assert_same, poisoned, refuses

from bastion_kernels import accept_path, bind_slots, take_best

SLOTS = 9


def ints(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("with_tails", [False, True])
def test_slots(with_tails: bool) -> None:
    slots, tails = (poisoned(SLOTS, dtype=t).to(DEVICE) for t in (torch.int64, torch.int32))
    bound = bind_slots.bind(slots=slots, tail_lens=tails)
    for mapped in ([4, 1], [0, 2], [5], [7, 8], [3]):
        starts = ints(*range(0, 3 * len(mapped) + 1, 3)) if with_tails else None
        given = ints(*mapped, dtype=torch.int64), starts
        bound(*given)
        expected = torch.empty_like(slots), torch.empty_like(tails)
        bind_slots(given[0], *expected, starts)
        assert_same((slots, tails), expected)
        assert slots[: len(mapped)].tolist() == mapped


def test_the_best_nodes() -> None:
    g = torch.Generator().manual_seed(0)
    log_rho = (-torch.rand(SLOTS, 6, generator=g)).sort(1, descending=True).values.to(DEVICE)
    limits, rest = ints(*[6] * SLOTS), ints(*range(1, SLOTS + 1))
    ends, scratch = (torch.zeros(SLOTS + 1, dtype=torch.int32, device=DEVICE) for _ in range(2))
    kept = {"log_rho": log_rho, "limits": limits, "rest": rest, "scratch": scratch}
    bound = take_best.bind(**kept, rows_start=ends)
    for total, mapped in ((5, [4, 1, 0]), (1, [0, 2, 8]), (17, [5, 7, 3]), (3, [1])):
        slots = ints(*mapped, dtype=torch.int64)
        starts = poisoned(len(mapped) + 1, dtype=torch.int32).to(DEVICE)
        bound(slots, total, starts)
        own, own_ends = torch.empty_like(starts), torch.empty_like(ends[: len(mapped) + 1])
        take_best(**kept, slots=slots, total=total, logits_start=own, rows_start=own_ends)
        assert_same((starts, ends[: len(mapped) + 1]), (own, own_ends))
        assert int(starts[-1]) == total + len(mapped)


def test_paths_of_as_many_requests_with_other_rows() -> None:
    parents = ints(*range(3)).repeat(SLOTS, 1)
    bound = accept_path.bind(parents=parents, sources=None)
    for rows in ([2, 1], [4, 3], [1, 1], [3]):
        starts = ints(0, *torch.tensor(rows).cumsum(0).tolist())
        tokens = torch.arange(int(starts[-1]), device=DEVICE)
        slots = ints(*range(len(rows)), dtype=torch.int64)
        outs = [poisoned(len(rows), 4, dtype=t).to(DEVICE) for t in (torch.int32, torch.int64)]
        count = poisoned(len(rows), dtype=torch.int32).to(DEVICE)
        bound(tokens + 1, tokens, slots, starts, *outs, count)
        # every node has its parent's token plus one, and so does every draw
        assert count.tolist() == rows
        assert outs[1][0, : rows[0]].tolist() == list(range(1, rows[0] + 1))


def test_the_first_call_of_a_batch_size_is_checked() -> None:
    slots = poisoned(SLOTS, dtype=torch.int64).to(DEVICE)
    bound = bind_slots.bind(slots=slots)
    bound(ints(1, dtype=torch.int64))
    refuses("tail_lens must have shape", bind_slots, ints(1), slots, ints(1))
    bind_slots._checked.clear()
    with pytest.raises(TypeError, match="idx_mapping must be"):
        bound(ints(2, 3, dtype=torch.int16))
