# SPDX-License-Identifier: Apache-2.0
"""The buffers of trees on a CPU, and trees from logits, as a drafter grows them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from vllm_bastion.policy.trees import Trees


def make_trees(
    reqs: int, nodes: int, depth: int, top_k: int = 3, rows: int = 64, budget: int | None = None
) -> Trees:
    """Buffers for `reqs` requests and steps of `rows` rows."""
    return Trees(
        max_num_reqs=reqs, max_num_tokens=rows, num_nodes=nodes, depth=depth, top_k=top_k,
        budget=budget, device=torch.device("cpu"),
    )  # fmt: skip


def grow(
    trees: Trees,
    logits: torch.Tensor,
    num_reqs: int,
    vocab_start: int = 0,
    all_gather: Callable[[torch.Tensor], torch.Tensor] | None = None,
    draft_id_to_target_id: torch.Tensor | None = None,
) -> None:
    """Build the trees of a batch from [num_reqs * D, V] logits, as a drafter does in parts."""
    trees.rank(logits, 0, vocab_start, all_gather)
    trees.grow_ranked(num_reqs, len(logits) // num_reqs, draft_id_to_target_id)
