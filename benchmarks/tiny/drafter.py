# SPDX-License-Identifier: Apache-2.0
"""The tiny DFlash drafter; computes exactly the same as vLLM's `qwen3_dflash.py`.

One drafter pass guesses a whole block. It sees two kinds of rows:

- Context: one row for each position that the target has processed, `c = hidden_norm(fc(features))`.
  It only gives keys and values (`k_norm(k_proj(c))` with rotary, `v_proj(c)`), with the same c for
  every layer.
- The block: the last accepted token, then mask tokens, embedded by the target's embedding. These
  rows go through the layers. They attend to all context before the block and to each other in both
  directions, and mask number j (1-based) gives the logits of the token at its own position.

Shapes: B sequences, T context tokens, A blocks (anchors) per sequence, G = block size.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from benchmarks.tiny.model import Dims, Layer, RMSNorm, Target, hf_config, rope_tables, save_bf16

BLOCK_SIZE = 16
TARGET_LAYER_IDS = Target.feature_layers
CANDIDATES = 32  # per position, scored by the selector in vLLM


class Selector(nn.Module):
    """DFlash2's head (`qwen3_dflash2.py`): scores of neighbouring tokens, of a low rank."""

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


class Drafter(nn.Module):
    """DFlash draft model without embedding and head, which are the target's.

    vocabulary: ascending ids [V'] of the target's tokens that are drafted; None: all of them.
    """

    vocabulary: Tensor | None

    def __init__(
        self,
        dims: Dims,
        mask_id: int,
        vocabulary: Tensor | None = None,
        block_size: int = BLOCK_SIZE,
    ) -> None:
        super().__init__()
        self.block_size = block_size
        self.dims = dims
        self.mask_id = mask_id
        self.register_buffer("vocabulary", vocabulary, persistent=False)
        h = dims.hidden_size
        self.fc = nn.Linear(len(TARGET_LAYER_IDS) * h, h, bias=False)
        self.hidden_norm = RMSNorm(h, dims.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(dims) for _ in range(dims.num_hidden_layers))
        self.norm = RMSNorm(h, dims.rms_norm_eps)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    @property
    def head(self) -> Selector | None:
        """DFlash2's, if there is one."""
        return next((m for m in self.children() if isinstance(m, Selector)), None)

    def logits(self, target: Target, states: Tensor, before: Tensor) -> Tensor:
        """[..., D, V] logits of blocks' states [..., D, H] that follow the tokens `before`."""
        logits = self.plain_logits(target, states).float()
        if self.head is None:
            return logits
        return logits + self.head.bias(before, states).float()

    def plain_logits(self, target: Target, states: Tensor) -> Tensor:
        """The target's head on states [..., H], over the drafted tokens: [..., V']."""
        if self.vocabulary is None:
            return target.logits(states)
        rows = target.embed_tokens.weight[self.vocabulary]
        return F.linear(states.to(rows.dtype), rows)

    def indices(self, tokens: Tensor) -> Tensor:
        """The places of tokens among the drafted ones; -1 for any other token."""
        if self.vocabulary is None:
            return tokens
        at = torch.searchsorted(self.vocabulary, tokens).clamp(max=len(self.vocabulary) - 1)
        return torch.where(self.vocabulary[at] == tokens, at, -1)

    def forward(self, target: Target, features: Tensor, tokens: Tensor, anchors: Tensor) -> Tensor:
        """Draft states for A blocks of every sequence.

        features: [B, T, F*H] of the target for positions 0..T-1.
        tokens: [B, A], the last accepted token of each block, at position anchors.
        anchors: [B, A]; a block at position a sees context 0..a-1.
        Returns [B, A, G-1, H], ready for the target's head; row j guesses position anchor+1+j.
        """
        batch, context_len = features.shape[:2]
        num_blocks = anchors.shape[1]
        device = features.device
        context = self.hidden_norm(self.fc(features))
        ids = torch.full((batch, num_blocks, self.block_size), self.mask_id, device=device)
        ids[:, :, 0] = tokens
        x = target.embed_tokens(ids.flatten(1)).to(self.fc.weight.dtype)
        positions = (anchors[..., None] + torch.arange(self.block_size, device=device)).flatten(1)
        q_cos, q_sin = (t[:, None] for t in rope_tables(self.dims, positions))
        c_positions = torch.arange(context_len, device=device)
        c_cos, c_sin = (t[None, None] for t in rope_tables(self.dims, c_positions))
        mask = self._mask(anchors, context_len)
        for layer in self.layers:
            attn, normed = layer.self_attn, layer.input_layernorm(x)
            q = attn.queries(normed, q_cos, q_sin)
            k, v = attn.keys_values(normed, q_cos, q_sin)
            ck, cv = attn.keys_values(context, c_cos, c_sin)
            x = x + attn.attend(q, torch.cat([ck, k], dim=2), torch.cat([cv, v], dim=2), mask)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x).unflatten(1, (num_blocks, self.block_size))[:, :, 1:]

    def _mask(self, anchors: Tensor, context_len: int) -> Tensor:
        """[B, 1, A*G, T + A*G]: the context before a row's block, and its whole block."""
        batch, num_blocks = anchors.shape
        arange = torch.arange(context_len, device=anchors.device)
        context = arange < anchors[..., None]  # [B, A, T]
        context = context.repeat_interleave(self.block_size, dim=1)
        row = torch.arange(num_blocks * self.block_size, device=anchors.device)
        own = row[:, None] // self.block_size == row // self.block_size
        return torch.cat([context, own.expand(batch, -1, -1)], dim=-1)[:, None]


def save_drafter(model: Drafter, folder: Path, target: Target, eos_id: int) -> None:
    """Write the checkpoint in vLLM's format, without the embedding.

    The head is left out too, unless only some of the target's tokens are drafted: then the file has
    the head's rows for them, and `d2t`, the offset from the place of each to its id.
    """
    dflash = {"mask_token_id": model.mask_id, "target_layer_ids": list(target.feature_layers)}
    kind: dict[str, Any] = {"architectures": ["DFlashDraftModel"], "dflash_config": dflash}
    weights = model.state_dict()
    if model.vocabulary is not None:
        kind["draft_vocab_size"] = len(model.vocabulary)
        places = torch.arange(len(model.vocabulary), device=model.vocabulary.device)
        weights["lm_head.weight"] = target.embed_tokens.weight[model.vocabulary]
        weights["d2t"] = model.vocabulary - places
    if model.head is not None:
        kind["architectures"] = ["DFlash2DraftModel"]
        dflash |= model.head.config()
        weights |= model.head.around(model.dims)
    config = hf_config(
        model.dims,
        **kind,
        block_size=model.block_size,
        num_target_layers=target.dims.num_hidden_layers,
        layer_types=["full_attention"] * model.dims.num_hidden_layers,
        max_window_layers=model.dims.num_hidden_layers,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=eos_id,
        pad_token_id=eos_id,
    )
    save_bf16(weights, folder, config)


def load_drafter(folder: Path, device: str = "cpu") -> Drafter:
    """Read back what `save_drafter` wrote, in float32 (of bf16-rounded values)."""
    config = json.loads((folder / "config.json").read_text())
    dims = Dims(**{k: config[k] for k in Dims.__dataclass_fields__})
    dflash = config["dflash_config"]
    weights = load_file(folder / "model.safetensors")
    weights.pop("lm_head.weight", None)  # the target's rows
    offsets = weights.pop("d2t", None)
    vocabulary = None if offsets is None else offsets + torch.arange(len(offsets))
    model = Drafter(dims, dflash["mask_token_id"], vocabulary, config["block_size"])
    if "selector_rank" in dflash:
        model.candidate_selector = Selector(dims, dflash["selector_rank"])
    own = {n: w.float() for n, w in weights.items() if "_conv." not in n}  # identities
    model.load_state_dict(own)
    return model.to(device).eval()
