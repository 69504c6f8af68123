# SPDX-License-Identifier: Apache-2.0
"""The rows of steps without a draft that are stored for the drafter: where, and when."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from bastion_kernels import context_rows
from vllm_bastion.engine.runtime import Runtime
from vllm_bastion.hooks.model_runner import BastionModelRunner

BLOCK, DROPPED = 4, -1


def starts_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0).to(torch.int32)


def test_accepted_rows_are_stored_where_their_tokens_are() -> None:
    # Requests with cached tokens, rows of the step, rows that the drafter sees, accepted rows: a
    # tree whose path has 2 rows, a prompt's chunk, a root without a node, a full path.
    computed, rows, seen, accepted = [9, 0, 30, 5], [6, 5, 1, 4], [4, 5, 4, 4], [2, 5, 1, 4]
    tables = torch.randperm(64, generator=torch.Generator().manual_seed(0)).view(4, 16)

    def slot(request: int, position: int) -> int:
        return int(tables[request, position // BLOCK]) * BLOCK + position % BLOCK

    given = [slot(r, computed[r] + i) for r in range(4) for i in range(rows[r])]
    both = [torch.tensor(given), torch.tensor(given) + 1000]  # of two KV cache groups
    positions = torch.tensor([computed[r] + i for r in range(4) for i in range(rows[r])])
    found, source = torch.zeros(2, sum(seen), dtype=torch.int64)
    slots = [torch.zeros_like(found) for _ in both]
    path = torch.tensor([[0, 2, -1, -1], [0, -1, -1, -1], [0, -1, -1, -1], [0, 1, 2, 3]])
    sampled = torch.tensor([2, 0, 1, 4]).int()  # the chunk is not the prompt's last
    context_rows(
        starts_of(seen), torch.tensor([0, 4, 0, 0]).int(), starts_of(rows),
        starts_of([6, 1, 1, 4]), path.int(), positions, sampled, torch.zeros(4).int(), source,
        found, torch.zeros(4).int(), max(seen), both, slots,
    )  # fmt: skip
    for r, begin in enumerate(starts_of(seen)[:-1].tolist()):
        for i in range(seen[r]):
            position, row = computed[r] + i, begin + i
            kept = i < accepted[r]
            assert int(found[row]) == (position if kept else 0)
            place = slot(r, position)
            assert [int(group[row]) for group in slots] == (
                [place, place + 1000] if kept else [DROPPED, DROPPED]
            )


def test_rows_that_wait_are_stored_before_vllm_copies_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner, order = object.__new__(BastionModelRunner), []
    monkeypatch.setattr(GPUModelRunner, "execute_model", lambda *_: order.append("runs"))
    runtime = runner.runtime = Runtime(SimpleNamespace())
    runtime.context = SimpleNamespace(flush=lambda: order.append("stored"))
    for copies in (None, [object()]):
        output = SchedulerOutput.make_empty()
        output.kv_cache_block_copies = copies
        runner.execute_model(output)
    assert order == ["runs", "stored", "runs"]
