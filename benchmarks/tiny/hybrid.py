# SPDX-License-Identifier: Apache-2.0
"""The hybrid pair's target: a small Qwen3-Next, three gated delta networks per full attention.

transformers computes it, in float32 and with autograd. This class has the interface of the tiny
target (`model.py`) for training, continuations and evaluation. vLLM's CPU kernels need bf16 and
heads of 128 in the gated delta layers.
"""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from model import Dims
from torch import Tensor, nn
from transformers import DynamicCache, Qwen3NextConfig, Qwen3NextForCausalLM

ARCHITECTURE = "Qwen3NextForCausalLM"
LAYERS = 8
_DIMS = Dims(num_hidden_layers=LAYERS)
# vLLM's model needs an expert layer, here the last, which uses all experts for every token.
_SPARSE: dict[str, Any] = {
    "mlp_only_layers": list(range(LAYERS - 1)),
    "num_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 256,
}
_RECURRENT: dict[str, Any] = {
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}


class HybridTarget(nn.Module):
    """Qwen3-Next with a tied head. Shapes as in `model.Target`."""

    feature_layers = (1, 4, 6)

    def __init__(self, lm: Qwen3NextForCausalLM | None = None) -> None:
        super().__init__()
        self.dims = _DIMS
        self.lm = _new() if lm is None else lm
        self.lm.lm_head.requires_grad_(False)  # stored as a copy of the embedding

    @property
    def embed_tokens(self) -> nn.Embedding:
        """The embedding, which is also the head."""
        return self.lm.model.embed_tokens

    @property
    def final_scale(self) -> Tensor:
        """The scale of the last norm: [H]."""
        return 1 + self.lm.model.norm.weight

    def cache(self, batch: int, length: int, device: torch.device) -> DynamicCache:
        """States and keys of `batch` sequences; grows to `length` by itself."""
        return DynamicCache(config=self.lm.config)

    def forward(
        self,
        ids: Tensor,
        *,
        cache: DynamicCache | None = None,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        features: tuple[int, ...] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """As `model.Target.forward`, but always causal: `mask` is ignored."""
        out = self.lm.model(
            ids,
            position_ids=None if positions is None else positions[None],
            past_key_values=cache,
            use_cache=cache is not None,
            output_hidden_states=bool(features),
        )
        states = [out.hidden_states[i + 1] for i in features]
        return out.last_hidden_state, torch.cat(states, dim=-1) if states else None

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [..., V] through the tied head."""
        return F.linear(hidden, self.embed_tokens.weight)

    def save(self, folder: Path) -> None:
        """Write the checkpoint in bf16 with a separate head; vLLM's model does not tie it."""
        lm = deepcopy(self.lm).to("cpu", torch.bfloat16)
        lm.lm_head.weight.data.copy_(lm.model.embed_tokens.weight)
        lm.save_pretrained(folder)


def _new() -> Qwen3NextForCausalLM:
    """Random weights; decays start as in Mamba-2, between 1 and about 1,000 tokens."""
    sizes = asdict(_DIMS)
    theta = sizes.pop("rope_theta")
    lm = Qwen3NextForCausalLM(
        Qwen3NextConfig(
            **sizes,
            **_SPARSE,
            **_RECURRENT,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": theta,
                "partial_rotary_factor": 0.5,
            },
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=0,
            pad_token_id=0,
        )
    )
    for name, p in lm.named_parameters():
        if name.endswith("dt_bias"):
            step = torch.empty_like(p).uniform_(math.log(1e-3), math.log(1e-1)).exp()
            p.data.copy_(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus
        elif name.endswith("A_log"):
            p.data.uniform_(1, 16).log_()
    return lm


def load_hybrid(folder: Path, device: str = "cpu") -> HybridTarget:
    """Read back what `save` wrote, in float32 (of bf16-rounded values)."""
    lm = Qwen3NextForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return HybridTarget(lm).to(device).eval()
