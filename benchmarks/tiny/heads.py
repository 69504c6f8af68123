# SPDX-License-Identifier: Apache-2.0
"""Heads that condition on previous tokens, in plain torch with vLLM's parameter names.

Each adds a bias to the logits of a drafted position: DFlash2's selector (`qwen3_dflash2.py`) for a
pair of neighbouring tokens, weighted by the position's state; DSpark's Markov head
(`qwen3_dspark.py`) for the previous token alone; Domino's (SpecForge's names, which vLLM has not)
for all tokens of the block so far, weighted by the position's state. All have a low rank r.

Shapes: V vocabulary, H hidden, r rank, g state; `before` [...] are tokens, `states` [..., H].
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


class Domino(nn.Module):
    """Domino's bias given all tokens of the block before: a GRU over them, then an MLP."""

    name = "domino"  # of the module here; a checkpoint has its parts at the top level

    def __init__(self, dims: Dims, rank: int, state: int) -> None:
        super().__init__()
        hidden = dims.hidden_size
        self.prefix_gru = nn.GRU(hidden, state, batch_first=True, bias=False)
        self.embed_proj = nn.Sequential(
            nn.Linear(hidden + state, rank, bias=False),
            nn.SiLU(),
            nn.Linear(rank, dims.vocab_size, bias=False),
        )
        nn.init.normal_(self.embed_proj[0].weight, std=0.05)
        nn.init.normal_(self.embed_proj[2].weight, std=0.02)

    def bias(self, before: Tensor, states: Tensor, embedding: nn.Embedding) -> Tensor:
        """The logits' bias [..., V]; before [..., D]: a block's anchor, and the tokens after it."""
        embedded = embedding(before)
        with torch.autocast(embedded.device.type, enabled=False):
            prefix, _ = self.prefix_gru(embedded.float().flatten(0, -3))
        prefix = prefix.unflatten(0, embedded.shape[:-2]).to(states.dtype)
        return self.embed_proj(torch.cat([states, prefix], dim=-1))

    def config(self) -> dict[str, Any]:
        """Entries of `dflash_config`. Mask j gives the logits of its own position."""
        return {
            "projector_type": "domino",
            "emb_dim": self.embed_proj[0].out_features,
            "gru_hidden_dim": self.prefix_gru.hidden_size,
            "pure_draft_prefix_len": 0,
            "shift_label": False,
        }
