# SPDX-License-Identifier: Apache-2.0
"""Checks a drafter's tensors, their names and shapes, against its config and its target's.

All kinds of drafters share DFlash's backbone, whose tensors are named here; those of a kind's own
head are checked by its model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_bastion.checkpoints.files import Tensor
from vllm_bastion.checkpoints.rules import layers_read

Shape = tuple[int, ...]
# Names in a checkpoint -> those used here.
_ALIASES = {"encoder.output_norm_enc.": "hidden_norm.", "encoder.fc.": "fc."}
# In a safetensors header. A quantised drafter has tensors of other types, shapes and names.
_PLAIN_TYPES = frozenset({"F64", "F32", "F16", "BF16", "I64", "I32", "BOOL"})
_THE_RIGHT_ONE = "use the drafter that was trained for this target"


def misfit(
    config: Any, name: str, hidden_size: int, vocab: int, tensors: Mapping[str, Tensor] | None
) -> str | None:
    """Why a drafter's weights do not fit its config or its target, in one sentence, or None.

    Args:
        config: the drafter's Hugging Face config.
        name: what the user gave as "model".
        hidden_size: of the target.
        vocab: of the target.
        tensors: the drafter's, by name; None if unknown.
    """
    read = getattr(config, "target_hidden_size", None) or config.hidden_size
    if read != hidden_size:
        return (
            f'drafter "{name}" reads hidden states of size {read}, and the target has '
            f"{hidden_size}: {_THE_RIGHT_ONE}"
        )
    if tensors is None or any(one.dtype not in _PLAIN_TYPES for one in tensors.values()):
        return None
    found = {_alias(key): one.shape for key, one in tensors.items()}
    return _from_target(config, name, hidden_size, vocab, found) or _against_config(
        config, name, found
    )


def _from_target(
    config: Any, name: str, hidden_size: int, vocab: int, found: Mapping[str, Shape]
) -> str | None:
    """Why a drafter without its own embedding, head or token mapping cannot use the target's."""
    shared = [part for part in ("embed_tokens", "lm_head") if not _has(found, part)]
    if shared and config.hidden_size != hidden_size:
        return (
            f'drafter "{name}" has no {" and no ".join(shared)} of its own and hidden_size '
            f"{config.hidden_size}, and the target's has {hidden_size}: {_THE_RIGHT_ONE}"
        )
    own = getattr(config, "draft_vocab_size", None) or vocab
    if own < vocab:
        missing = [part for part in ("lm_head", "d2t") if not _has(found, part)]
        if missing:
            return (
                f'drafter "{name}" has draft_vocab_size {own} of the target\'s {vocab} tokens and '
                f"no {' and no '.join(missing)} in its files: use a complete checkpoint"
            )
    return None


def _against_config(config: Any, name: str, found: Mapping[str, Shape]) -> str | None:
    """Tensors of other shapes than the config says, and missing ones."""
    expected = _expected(config)
    for key, shape in expected.items():
        if key in found and found[key] != shape:
            return (
                f'drafter "{name}" has {key} of shape {_shown(found[key])}, and its config and '
                f"target make it {_shown(shape)}: {_THE_RIGHT_ONE}, with its own config.json"
            )
    first = "layers.0.self_attn.q_proj.weight"
    lost = [key for key in expected if "_proj" in key and key not in found]
    if lost and first in found:
        more = f" and {len(lost) - 1} others" if len(lost) > 1 else ""
        return (
            f'the files of drafter "{name}" lack {lost[0]}{more}, which its config names: use a '
            "complete checkpoint"
        )
    return None


def _expected(config: Any) -> dict[str, Shape]:
    hidden, inner = config.hidden_size, config.intermediate_size
    head = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    query, keys = head * config.num_attention_heads, head * config.num_key_value_heads
    out: dict[str, Shape] = {
        "embed_tokens.weight": (config.vocab_size, hidden),
        "lm_head.weight": (getattr(config, "draft_vocab_size", None) or config.vocab_size, hidden),
        "norm.weight": (hidden,),
        "hidden_norm.weight": (hidden,),
    }
    if layers := layers_read(config):
        read = getattr(config, "target_hidden_size", None) or hidden
        out["fc.weight"] = (hidden, read * len(layers))
    for layer in range(config.num_hidden_layers):
        parts: dict[str, Shape] = {
            "self_attn.q_proj": (query, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, query),
            "self_attn.q_norm": (head,),
            "self_attn.k_norm": (head,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        out |= {f"layers.{layer}.{part}.weight": shape for part, shape in parts.items()}
    return out


def _alias(key: str) -> str:
    for written, used in _ALIASES.items():
        if key.startswith(written):
            return used + key.removeprefix(written)
    return key


def _has(found: Mapping[str, Shape], part: str) -> bool:
    return any(part in key.split(".") for key in found)


def _shown(shape: Shape) -> str:
    return " x ".join(map(str, shape))
