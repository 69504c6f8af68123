# SPDX-License-Identifier: Apache-2.0
"""The draft of many requests: its head sees some of them at a time, and the trees are the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.trees import grow, make_trees
from vllm_bastion.drafters.capacity import LOGITS_CHUNK_REQS, with_graphs
from vllm_bastion.drafters.dflash import BastionSpeculator
from vllm_bastion.policy.trees import Trees

DEPTH, VOCAB, WIDTH = 3, 96, 8


def bound_trees(requests: int) -> Trees:
    trees = make_trees(requests, 5, DEPTH, top_k=4, rows=4 * requests)
    trees.bind_rows(torch.arange(requests))
    return trees


@pytest.mark.parametrize(
    "requests", [1, LOGITS_CHUNK_REQS, LOGITS_CHUNK_REQS + 1, 3 * LOGITS_CHUNK_REQS + 5]
)
def test_no_more_than_64_requests_have_logits_at_once(requests: int) -> None:
    generator = torch.Generator().manual_seed(requests)
    weight = 4 * torch.randn(WIDTH, VOCAB, generator=generator)
    hidden = torch.randn(requests * DEPTH, WIDTH, generator=generator)
    seen: list[int] = []

    def head(_: Any, rows: torch.Tensor) -> torch.Tensor:
        seen.append(len(rows))
        return rows @ weight

    model = SimpleNamespace(
        lm_head=SimpleNamespace(tp_size=1), logits_processor=head, draft_id_to_target_id=None
    )
    trees, whole = bound_trees(requests), bound_trees(requests)
    speculator: Any = SimpleNamespace(model=model, trees=trees)
    BastionSpeculator._grow_trees(speculator, hidden, requests)
    assert sum(seen) == requests * DEPTH and max(seen) <= LOGITS_CHUNK_REQS * DEPTH
    grow(whole, hidden @ weight, requests)
    for name in ("tokens", "parents", "depths", "size"):
        assert torch.equal(getattr(trees, name), getattr(whole, name)), name


@pytest.mark.parametrize("rows", [4, 8, 16])
@pytest.mark.parametrize("requests", [1, 33, 40, 64, 1024])
def test_a_drafter_has_graphs_for_up_to_64_requests(requests: int, rows: int) -> None:
    """At the target's sizes, drafts of blocks of 16 had none for 33 and more."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    config: Any = SimpleNamespace(
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=512
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=requests),
    )
    compilation = with_graphs(config, rows).compilation_config
    assert config.compilation_config.cudagraph_capture_sizes == sizes
    captured = [-(-size // rows) for size in compilation.cudagraph_capture_sizes]
    captured = [
        count for count in captured if count * rows <= compilation.max_cudagraph_capture_size
    ]
    assert max(captured) <= LOGITS_CHUNK_REQS, "parts and buffers are for so many"
    for count in range(1, min(requests, LOGITS_CHUNK_REQS) + 1):
        padded = min(size for size in captured if size >= count)
        assert padded - count <= 3 and (count > 32 or padded == count or rows < 16)


def _with_sizes(sizes: list[int]) -> Any:
    return SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=sizes),
        scheduler_config=SimpleNamespace(max_num_seqs=64),
    )


def test_an_engine_without_graphs_stays_without() -> None:
    config = _with_sizes([])
    assert with_graphs(config, 16) is config


def test_a_drafter_has_graphs_where_the_targets_are_all_too_large() -> None:
    compilation = with_graphs(_with_sizes([128, 256]), 1).compilation_config
    assert compilation.cudagraph_capture_sizes[0] <= 4
    assert compilation.cudagraph_capture_sizes[-1] == 64
