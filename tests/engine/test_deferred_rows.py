# SPDX-License-Identifier: Apache-2.0
"""Which rows of plain steps are stored, and when."""

from __future__ import annotations

import torch

from vllm_bastion.engine.deferred import DeferredContext


def _kept(rows: int = 16) -> tuple[DeferredContext, list[list[int]]]:
    """A context of `rows` rows, and the positions that it has stored, flush by flush."""
    positions = torch.zeros(rows, dtype=torch.int64)
    stored: list[list[int]] = []
    context = DeferredContext(
        [torch.zeros(rows, 4)], positions, torch.zeros(1, rows, dtype=torch.int64), 2,
        lambda count: stored.append(positions[:count].tolist()),
    )  # fmt: skip
    return context, stored


def _add(context: DeferredContext, positions: list[int], requests: list[str]) -> None:
    at = torch.tensor(positions)
    context.add([torch.ones(len(at), 4)], at, [at], len(at), requests)


def test_rows_that_nobody_can_find_are_dropped() -> None:
    context, stored = _kept()
    _add(context, [0, 1, 2], ["a"])
    context.leave("a", needed=False)
    context.flush()
    assert stored == []


def test_rows_of_a_request_that_leaves_are_stored_if_its_blocks_can_be_found() -> None:
    context, stored = _kept()
    _add(context, [0, 1, 2], ["a"])
    context.leave("a", needed=True)
    assert stored == [[0, 1, 2]]


def test_other_requests_keep_their_rows() -> None:
    context, stored = _kept()
    _add(context, [7, 40], ["a", "b"])
    context.leave("c", needed=True)  # it has no rows
    assert stored == []
    context.leave("a", needed=False)
    assert stored == [[7, 40]]
    _add(context, [41], ["b"])
    context.leave("a", needed=True)  # its rows are stored
    assert stored == [[7, 40]]
    context.leave("b", needed=False)
    context.flush()
    assert stored == [[7, 40]]


def test_a_full_buffer_is_stored() -> None:
    context, stored = _kept(rows=4)
    _add(context, [0, 1], ["a"])
    assert context.has_room(2) and not context.has_room(3)
    _add(context, [2], ["a"])  # no room for a row of each of two requests
    assert stored == [[0, 1, 2]] and context.has_room(4)
