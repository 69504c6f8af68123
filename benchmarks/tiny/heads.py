# SPDX-License-Identifier: Apache-2.0
"""Heads that condition on previous tokens, in plain torch with vLLM's parameter names.

Each adds a bias to the logits of a drafted position: DFlash2's selector (`qwen3_dflash2.py`) for a
pair of neighbouring tokens, weighted by the position's state; DSpark's Markov head
(`qwen3_dspark.py`) for the previous token alone. Both have a low rank r.

Shapes: V vocabulary, H hidden, r rank; `before` [...] are tokens, `states` [..., H].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.tiny.model import Dims

CANDIDATES = 32  # per position, scored by the heads in vLLM


class Selector(nn.Module):
    """DFlash2's low-rank scores of neighbouring tokens."""

    name = "candidate_selector"

    def __init__(self, dims: Dims, rank: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.randn(dims.vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(dims.vocab_size, rank))
        self.hidden_projection = nn.Linear(dims.hidden_size, rank, bias=False)

    def bias(self, before: Tensor, states: Tensor) -> Tensor:
        """The logits' bias given the previous token: [..., V]."""
        left = self.predecessor_codebook[before] * self.hidden_projection(states)
        return left @ self.successor_codebook.T

    def config(self) -> dict[str, Any]:
        return {
            "selector_rank": self.successor_codebook.shape[1],
            "selector_top_k": CANDIDATES,
            "conv_kernel_size": 1,
            "conv_group_size": self.hidden_projection.in_features,
        }

    def around(self, dims: Dims) -> dict[str, Tensor]:
        """Identities in place of the convolutions of DFlash2's layers."""
        size = dims.hidden_size
        weights: dict[str, Tensor] = {}
        for layer in range(dims.num_hidden_layers):
            for part in ("attention_conv", "mlp_conv"):
                prefix = f"layers.{layer}.{part}."
                weights[prefix + "base_kernel"] = torch.ones(2, 1, size)
                weights[prefix + "kernel_projection.weight"] = torch.zeros(2, size)
        return weights


class Markov(nn.Module):
    """DSpark's bias given the previous token."""

    name = "markov_head"

    def __init__(self, dims: Dims, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(dims.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, dims.vocab_size, bias=False)
        nn.init.zeros_(self.markov_w2.weight)

    def bias(self, before: Tensor, states: Tensor) -> Tensor:
        """The logits' bias given the previous token: [..., V]."""
        return self.markov_w2(self.markov_w1(before))

    def config(self) -> dict[str, Any]:
        """Entries at the top level of the config, where DSpark has them."""
        return {
            "markov_rank": self.markov_w1.embedding_dim,
            "dspark_draft_topk": CANDIDATES,
            # DFlash's block: the anchor, then a mask for each drafted token.
            "sample_from_anchor": False,
        }
