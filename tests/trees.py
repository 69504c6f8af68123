# SPDX-License-Identifier: Apache-2.0
"""Trees from logits, as a drafter grows them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from vllm_bastion.policy.trees import Trees


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
