# SPDX-License-Identifier: Apache-2.0
"""The tiny target: a Qwen3 decoder in plain torch, with Hugging Face's parameter names.

Written out rather than imported so that training is quick on two cores, the drafter can share the
layers, and the hidden states that DFlash reads are visible. A test compares it with transformers.

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
    """Qwen3 attention: per-head RMS norm of queries and keys, rotary, grouped heads.

    head_norms: False for Llama's attention, which has no such norms.
    """

    def __init__(self, dims: Dims, head_norms: bool = True) -> None:
        super().__init__()
        self.dims = dims
        h, d = dims.hidden_size, dims.head_dim
        self.q_proj = nn.Linear(h, dims.num_attention_heads * d, bias=False)
        self.k_proj = nn.Linear(h, dims.num_key_value_heads * d, bias=False)
        self.v_proj = nn.Linear(h, dims.num_key_value_heads * d, bias=False)
        self.o_proj = nn.Linear(dims.num_attention_heads * d, h, bias=False)
        self.q_norm = RMSNorm(d, dims.rms_norm_eps) if head_norms else nn.Identity()
        self.k_norm = RMSNorm(d, dims.rms_norm_eps) if head_norms else nn.Identity()

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

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """q [B, NH, T, D], k and v [B, NK, S, D] -> [B, T, H].

        mask: [B, 1, T, S]; None for a causal one.
        """
        out = F.scaled_dot_product_attention(
            q, k.to(q.dtype), v.to(q.dtype), mask, is_causal=mask is None, enable_gqa=True
        )
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
    """Pre-norm decoder layer; the target and the drafter call its parts differently."""

    def __init__(self, dims: Dims, head_norms: bool = True) -> None:
        super().__init__()
        self.self_attn = Attention(dims, head_norms)
        self.mlp = MLP(dims)
        self.input_layernorm = RMSNorm(dims.hidden_size, dims.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(dims.hidden_size, dims.rms_norm_eps)


class Target(nn.Module):
    """Qwen3 language model with a tied head; a Llama model without `head_norms`."""

    feature_layers = (1, 3, 4)  # whose outputs its drafters read

    def __init__(self, dims: Dims, head_norms: bool = True) -> None:
        super().__init__()
        self.dims = dims
        self.embed_tokens = nn.Embedding(dims.vocab_size, dims.hidden_size)
        layers = range(dims.num_hidden_layers)
        self.layers = nn.ModuleList(Layer(dims, head_norms) for _ in layers)
        self.norm = RMSNorm(dims.hidden_size, dims.rms_norm_eps)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                # Layers that write to the residual stream start smaller.
                out = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(p, std=0.02 / (2 * dims.num_hidden_layers) ** 0.5 if out else 0.02)

    def forward(
        self, ids: Tensor, *, features: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """A causal pass over ids [B, T].

        Returns the final normed states [B, T, H] and the outputs of the layers in `features`
        side by side [B, T, len(features)*H], which is what vLLM hands to a DFlash drafter for
        `target_layer_ids == features`.
        """
        positions = torch.arange(ids.shape[1], device=ids.device)
        cos, sin = (t[None, None] for t in rope_tables(self.dims, positions))
        x = self.embed_tokens(ids)
        states: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            attn, normed = layer.self_attn, layer.input_layernorm(x)
            k, v = attn.keys_values(normed, cos, sin)
            x = x + attn.attend(attn.queries(normed, cos, sin), k, v)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            if i in features:
                states.append(x)
        return self.norm(x), torch.cat(states, dim=-1) if states else None

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


def load_target(folder: Path, device: str = "cpu") -> Target:
    """Read a Qwen3 or Llama model with a tied head, in float32.

    Weights are stored in bf16. A Llama's drafters read three of its layers: the second, the third
    from the last, and the middle one between them.
    """
    config = json.loads((folder / "config.json").read_text())
    dims = Dims(**{k: config[k] for k in Dims.__dataclass_fields__})
    llama = config["architectures"] == ["LlamaForCausalLM"]
    model = Target(dims, head_norms=not llama)
    if llama:
        last = dims.num_hidden_layers - 3
        model.feature_layers = (1, (1 + last) // 2, last)
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({n.removeprefix("model."): w.float() for n, w in weights.items()})
    return model.to(device).eval()
