# SPDX-License-Identifier: Apache-2.0
"""An EAGLE-3 head for the tiny target; computes the same as vLLM's `llama_eagle3.py`.

One decoder layer drafts one token after another. The row of position p reads the token at p + 1 and
a state: in the first pass the target's features of position p, in later passes its own last output.
It gives the logits of the token at p + 2.

The head is trained as it is used ("training-time test" in the paper): every position of a row of
text is drafted from, `DEPTH` passes deep, and pass number k attends to the first pass's keys up to
its own start and to the keys of its own passes 1 to k.

Shapes: B sequences, T positions, H hidden, NH/NK query/key-value heads of D, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path

import torch
from model import MLP, Attention, Dims, RMSNorm, Target, hf_config, rope_tables, rotate, save_bf16
from torch import Tensor, nn

DEPTH = 5  # passes in training
_DECAY = 0.8  # weight of a pass's loss relative to the pass before


class MidLayer(nn.Module):
    """The decoder layer; its attention reads the token's embedding and the state side by side."""

    def __init__(self, dims: Dims) -> None:
        super().__init__()
        self.self_attn = Attention(dims)
        del self.self_attn.q_norm, self.self_attn.k_norm  # Llama has none
        heads, size = self.self_attn, 2 * dims.hidden_size
        for name in ("q_proj", "k_proj", "v_proj"):
            rows = getattr(heads, name).out_features
            setattr(heads, name, nn.Linear(size, rows, bias=False))
        self.mlp = MLP(dims)
        self.input_layernorm = RMSNorm(dims.hidden_size, dims.rms_norm_eps)
        self.hidden_norm = RMSNorm(dims.hidden_size, dims.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(dims.hidden_size, dims.rms_norm_eps)


class Eagle3(nn.Module):
    """The head without the embedding, which is the target's."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.dims = dims = target.dims
        h = dims.hidden_size
        self.fc = nn.Linear(len(target.feature_layers) * h, h, bias=False)
        self.midlayer = MidLayer(dims)
        self.norm = RMSNorm(h, dims.rms_norm_eps)
        self.lm_head = nn.Linear(h, dims.vocab_size, bias=False)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)
        self.norm.weight.data.copy_(target.final_scale)
        self.lm_head.weight.data.copy_(target.embed_tokens.weight)

    def forward(self, embeds: Tensor, features: Tensor, depth: int) -> list[Tensor]:
        """The logits of each pass: `depth` tensors [B, T - k, V], k = 0, 1, ...

        embeds: [B, T, H], of the tokens at positions 1..T.
        features: [B, T, F*H] of the target at positions 0..T-1.
        In pass k, row p reads the token at p + 1 + k, so the last k rows are missing.
        """
        layer, attn = self.midlayer, self.midlayer.self_attn
        group = self.dims.num_attention_heads // self.dims.num_key_value_heads
        length = embeds.shape[1]
        state = self.fc(features)
        own_keys: list[Tensor] = []
        own_values: list[Tensor] = []
        out = []
        for k in range(depth):
            rows = length - k
            state = state[:, :rows]
            token = layer.input_layernorm(embeds[:, k:])
            x = torch.cat([token, layer.hidden_norm(state)], dim=-1)
            positions = torch.arange(k, length, device=x.device)
            cos, sin = (t[None, None] for t in rope_tables(self.dims, positions))
            q = rotate(attn.heads(attn.q_proj(x)), cos, sin)
            keys = rotate(attn.heads(attn.k_proj(x)), cos, sin).repeat_interleave(group, 1)
            values = attn.heads(attn.v_proj(x)).repeat_interleave(group, 1)
            own_keys.append(keys)
            own_values.append(values)
            scale = self.dims.head_dim**-0.5
            first = q @ own_keys[0][:, :, :rows].transpose(-1, -2) * scale
            hidden = torch.ones(rows, rows, dtype=torch.bool, device=x.device).triu(1)
            scores = [first.masked_fill(hidden, float("-inf"))]
            scores += [
                (q * later[:, :, :rows]).sum(-1, keepdim=True) * scale for later in own_keys[1:]
            ]
            weights = torch.cat(scores, dim=-1).float().softmax(-1).to(values.dtype)
            mixed = weights[..., :rows] @ own_values[0][:, :, :rows]
            for number, later in enumerate(own_values[1:]):
                mixed = mixed + weights[..., rows + number, None] * later[:, :, :rows]
            state = state + attn.o_proj(mixed.transpose(1, 2).flatten(2))
            state = state + layer.mlp(layer.post_attention_layernorm(state))
            out.append(self.lm_head(self.norm(state)))
        return out


def eagle3_loss(model: Eagle3, target: Target, rolls: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Cross-entropy with the target's distributions, and the share of hits of the first pass.

    rolls: a batch of `make_rollouts`. Only positions from `first` on count.
    """
    ids = rolls["ids"].long()
    length = ids.shape[1] - 2
    with torch.no_grad():
        embeds = target.embed_tokens(ids[:, 1:-1])
        labels = target.logits(rolls["hidden"].float()).float().softmax(-1)
    passes = model(embeds, rolls["features"][:, :length].float(), DEPTH)
    counted = torch.arange(length, device=ids.device) >= rolls["first"][:, None]
    total, norm, hits = torch.zeros(()), 0.0, torch.zeros(())
    for k, logits in enumerate(passes):
        rows = counted[:, : length - k]
        # Row p's token is at p + 2 + k; the target's state before it is at p + 1 + k.
        wanted = labels[:, 1 + k : 1 + length][rows]
        log_q = logits[rows].float().log_softmax(-1)
        weight = _DECAY**k
        total, norm = total - weight * (wanted * log_q).sum(-1).mean(), norm + weight
        if k == 0:
            hits = (log_q.argmax(-1) == wanted.argmax(-1)).float().mean()
    return total / norm, hits


def save_eagle3(model: Eagle3, folder: Path, eos_id: int) -> None:
    """Write the checkpoint in the published format, which vLLM's `eagle3` reads.

    vLLM counts layers by their inputs: the output of layer i is the input of layer i + 1. Its model
    reads their number in `eagle_config`; Model Runner V2 reads them at the top level.
    """
    layers = [i + 1 for i in Target.feature_layers]
    config = hf_config(
        model.dims,
        model_type="llama",
        architectures=["LlamaForCausalLMEagle3"],
        num_hidden_layers=1,
        draft_vocab_size=model.dims.vocab_size,
        eagle_aux_hidden_state_layer_ids=layers,
        eagle_config={"eagle_aux_hidden_state_layer_ids": layers, "use_aux_hidden_state": True},
        mlp_bias=False,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=eos_id,
        pad_token_id=eos_id,
    )
    save_bf16(model.state_dict(), folder, config)
