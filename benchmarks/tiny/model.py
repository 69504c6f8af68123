# SPDX-License-Identifier: Apache-2.0
"""Targets by transformers, and the layers of their drafters in plain torch.

Shapes: B sequences, T tokens, H hidden, NH/NK query/key-value heads of D, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel


@dataclass(frozen=True)
class Dims:
    vocab_size: int = 1024
    hidden_size: int = 192
    intermediate_size: int = 512
    num_hidden_layers: int = 6
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 32
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


def rope_tables(dims: Dims, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each [..., T, D], for positions [..., T]."""
    half = torch.arange(0, dims.head_dim, 2, device=positions.device).float() / dims.head_dim
    angle = positions[..., None].float() * dims.rope_theta**-half
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Neox-style rotary embedding of x [B, heads, T, D] with tables [B or 1, 1, T, D]."""
    a, b = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat([-b, a], dim=-1) * sin.to(x.dtype)


class Attention(nn.Module):
    """Qwen3 attention: per-head RMS norm of queries and keys, rotary, grouped heads."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.dims = dims
        h, d = dims.hidden_size, dims.head_dim
        self.q_proj = nn.Linear(h, dims.num_attention_heads * d, bias=False)
        self.k_proj = nn.Linear(h, dims.num_key_value_heads * d, bias=False)
        self.v_proj = nn.Linear(h, dims.num_key_value_heads * d, bias=False)
        self.o_proj = nn.Linear(dims.num_attention_heads * d, h, bias=False)
        self.q_norm = RMSNorm(d, dims.rms_norm_eps)
        self.k_norm = RMSNorm(d, dims.rms_norm_eps)

    def heads(self, x: Tensor) -> Tensor:
        """[B, T, n*D] -> [B, n, T, D]."""
        return x.unflatten(-1, (-1, self.dims.head_dim)).transpose(1, 2)

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, T, H] -> [B, NH, T, D]."""
        return rotate(self.q_norm(self.heads(self.q_proj(x))), cos, sin)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, T, H] -> keys and values, each [B, NK, T, D]."""
        keys = rotate(self.k_norm(self.heads(self.k_proj(x))), cos, sin)
        return keys, self.heads(self.v_proj(x))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """q [B, NH, T, D], k and v [B, NK, S, D], mask [B, 1, T, S] -> [B, T, H]."""
        k, v = k.to(q.dtype), v.to(q.dtype)
        out = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dims.hidden_size, dims.intermediate_size, bias=False)
        self.up_proj = nn.Linear(dims.hidden_size, dims.intermediate_size, bias=False)
        self.down_proj = nn.Linear(dims.intermediate_size, dims.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Pre-norm decoder layer of a drafter, which calls its parts."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.self_attn = Attention(dims)
        self.mlp = MLP(dims)
        self.input_layernorm = RMSNorm(dims.hidden_size, dims.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(dims.hidden_size, dims.rms_norm_eps)


class Target(nn.Module):
    """A model of transformers with a tied head. kind: its `model_type`, qwen3 or llama."""

    feature_layers = (1, 3, 4)  # whose outputs the tiny pair's drafters read

    def __init__(self, dims: Dims, kind: str = "qwen3") -> None:
        super().__init__()
        self.dims = dims
        config = AutoConfig.for_model(**(hf_config(dims) | {"model_type": kind}))
        self.model = AutoModel.from_config(config, dtype=torch.float32)
        if kind == "llama":
            self.feature_layers = feature_layers(dims.num_hidden_layers)
        self.embed_tokens, self.layers = self.model.embed_tokens, self.model.layers

    def forward(
        self, ids: Tensor, *, features: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """A causal pass over ids [B, T].

        Returns the final normed states [B, T, H] and the outputs of the layers in `features`
        side by side [B, T, len(features)*H], which is what vLLM hands to a DFlash drafter for
        `target_layer_ids == features`.
        """
        out = self.model(ids, output_hidden_states=True, use_cache=False)
        states = [out.hidden_states[layer + 1] for layer in features]
        return out.last_hidden_state, torch.cat(states, dim=-1) if states else None

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [..., V] through the tied head."""
        return F.linear(hidden, self.embed_tokens.weight)


def save_bf16(weights: Mapping[str, Tensor], folder: Path, config: dict) -> None:
    """Write weights by Hugging Face's names, floats rounded to bf16, and config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    rounded = {
        name: weight.detach().to("cpu", torch.bfloat16 if weight.is_floating_point() else None)
        for name, weight in weights.items()
    }
    rounded = {name: weight.contiguous() for name, weight in rounded.items()}
    save_file(rounded, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def hf_config(dims: Dims, **extra: object) -> dict:
    sizes = asdict(dims)
    theta = sizes.pop("rope_theta")
    return {
        "model_type": "qwen3",
        **sizes,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "rope_theta": theta,
        "rope_scaling": None,
        "use_cache": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "dtype": "bfloat16",
        **extra,
    }


def feature_layers(layers: int) -> tuple[int, int, int]:
    """Those that a Llama's drafters read: the second, the third from the last, the middle one."""
    last = layers - 3
    return 1, (1 + last) // 2, last


def load_target(folder: Path, device: str = "cpu") -> Target:
    """Read a Qwen3 or Llama model with a tied head, in float32. Weights are stored in bf16."""
    config = json.loads((folder / "config.json").read_text())
    dims = Dims(**{k: config[k] for k in Dims.__dataclass_fields__})
    model = Target(dims, config["model_type"])
    model.model.load_state_dict(
        {n.removeprefix("model."): w for n, w in load_file(folder / "model.safetensors").items()}
    )
    return model.to(device).eval()
