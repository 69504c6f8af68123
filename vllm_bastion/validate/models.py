# SPDX-License-Identifier: Apache-2.0
"""Validates the two models by their configs and the names of the drafter's tensors.

No weight is read. A drafter's config is Hugging Face's, a target vLLM's ModelConfig; names are the
user's, folders or names on Hugging Face.
"""

from __future__ import annotations

from typing import Any

from vllm_bastion.checkpoints import rules
from vllm_bastion.checkpoints.drafter_types import (
    DRAFTER_TYPES,
    architectures_of,
    drafter_type_of,
    refused_type,
)
from vllm_bastion.checkpoints.weights import misfit
from vllm_bastion.platform import current_host
from vllm_bastion.validate import BastionConfigError

# Hybrid targets whose recurrent layers are gated delta layers.
_GATED_DELTA = (
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)
# Beginnings of architectures whose layers choose the rows that they see by a learned index.
_SPARSE = ("MiniMaxM3Sparse", "Qwen4Exp")
# The types of drafters, as users know them.
DRAFTER_NAMES = ", ".join(drafter_type.name for drafter_type in DRAFTER_TYPES)


_WANTED = {
    "block_size": "a whole number of at least 2",
    "dflash_config": "the drafter's settings",
    "markov_rank": "the rank of its head",
}


def check_target(model: Any) -> None:
    """Refuse a target model that a tree cannot be verified on."""
    drafter_type = drafter_type_of(architectures_of(model.hf_config))
    if drafter_type is not None:
        raise BastionConfigError(
            f'"{model.model}", given as the target, is a drafter ({drafter_type.name}): '
            "exchange the two, the target is the model that is served and the drafter the "
            '"model" in speculative_config'
        )
    layer_types = set(getattr(model.hf_text_config, "layer_types", None) or ())
    hybrid = model.is_hybrid and "linear_attention" in layer_types
    causes = {
        "is a pooling model": model.runner_type != "generate",
        "is an encoder-decoder": model.is_encoder_decoder,
        "is a diffusion model": model.is_diffusion,
        f"is a {model.architecture}, which attends to rows that a learned index chooses": (
            model.architecture.startswith(_SPARSE)
        ),
        "has recurrent (Mamba-like) layers": model.is_attention_free
        or (model.is_hybrid and not hybrid),
        f"has recurrent layers in a {model.architecture}; known are the gated delta networks in a "
        f"{' or '.join(_GATED_DELTA)}": hybrid and model.architecture not in _GATED_DELTA,
        "has gated delta networks, which take trees on CPU hosts and NVIDIA GPUs only": hybrid
        and not current_host().serves_gated_delta(),
        "uses multi-head latent attention": model.use_mla,
        "has chunked local attention": model.attention_chunk_size
        or "chunked_attention" in layer_types,
        "keeps its prompt beside a sliding window (R-SWA)": model.rswa_window,
        "uses ALiBi": model.uses_alibi,
    }
    for what, applies in causes.items():
        if applies:
            raise BastionConfigError(
                f'the target "{model.model}" {what}: method "bastion" cannot verify trees on it, '
                "so use another target, or drop speculative_config"
            )
    if model.is_mm_prefix_lm:
        raise BastionConfigError(
            f'the target "{model.model}" attends to image tokens in both directions, which tree '
            "attention does not: set language_model_only to serve text, use another target, or "
            "drop speculative_config"
        )


def check_type(written: dict[str, Any], name: str) -> None:
    """Refuse a drafter of a type that is refused by name; written: its config.json."""
    refused = refused_type(written)
    if refused is not None:
        raise _not_served(name, f"{refused} drafter")


def _not_served(name: str, what: str) -> BastionConfigError:
    return BastionConfigError(
        f'"model": "{name}" is {what}, which method "bastion" grows no trees from: give a drafter '
        f"that was trained for the target, of the types {DRAFTER_NAMES}"
    )


def check_drafter(drafter: Any, keys: dict[str, Any], target: Any) -> None:
    """Check the drafter's config alone and against the target, then the names of its tensors.

    keys: the user's, checked.
    """
    name = keys["model"]
    architectures = architectures_of(drafter)
    drafter_type = drafter_type_of(architectures)
    if drafter_type is None:
        raise _not_served(name, f"of type {'+'.join(architectures) or drafter.model_type}")
    gamma, needed = drafter_type.gamma(drafter), getattr(drafter, drafter_type.needs, None)
    if not needed or gamma is None or gamma < 1:
        key = "block_size" if needed else drafter_type.needs
        raise BastionConfigError(
            f'the config of drafter "{name}" has "{key}": {getattr(drafter, key, None)!r}, where a '
            f"{drafter_type.name} checkpoint has {_WANTED[key]}: use a complete checkpoint"
        )
    vocab, whole = target.get_vocab_size(), drafter_type.candidates_key is not None
    refusal = (
        rules.refused_settings(drafter, name, drafter_type.candidates_key)
        or rules.refused_vocabulary(drafter, name, vocab, whole)
        or misfit(drafter, name, keys.get("revision"), target.get_hidden_size(), vocab)
    )
    if refusal is not None:
        raise BastionConfigError(refusal)
    layers = target.get_total_num_hidden_layers()
    beyond = [i for i in rules.layers_read(drafter) if not 0 <= i < layers]
    if beyond:
        raise BastionConfigError(
            f'drafter "{name}" reads target layer {beyond[0]} (target_layer_ids), and the target '
            f"has {layers} layers: use the drafter that was trained for this target"
        )
