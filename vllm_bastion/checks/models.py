# SPDX-License-Identifier: Apache-2.0
"""Checks of the two models: their configs, their classes in vLLM, the headers of their files.

No weight is read. A drafter's config is Hugging Face's, a target vLLM's ModelConfig; names are the
user's, folders or names on Hugging Face. "Written" is what a config.json holds.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from vllm_bastion import compat
from vllm_bastion.checkpoints import files
from vllm_bastion.checkpoints.kinds import (
    COMMON_CHECKS,
    KINDS,
    architectures_of,
    kind_of,
    other_family,
    refused_type,
)
from vllm_bastion.checkpoints.rules import layers_read
from vllm_bastion.checkpoints.weights import misfit
from vllm_bastion.checks import BastionConfigError
from vllm_bastion.platform import current_host

# The kinds of drafters, as users know them.
DRAFTER_NAMES = ", ".join(kind.name for kind in KINDS)

# Drafters that their pages call non-thinking, by the end of their names.
_WITHOUT_THINKING = re.compile(r"Qwen3-[48]B-(DFlash-b16|speculator\.dflash2)$")

# Hybrid targets whose recurrent layers are gated delta layers.
_GATED_DELTA = (
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)


def check_drafter(drafter: Any, name: str, target: Any) -> None:
    """Check the drafter's config, alone and against the target."""
    refuse_type(drafter, name)
    architectures = architectures_of(drafter)
    kind = kind_of(architectures)
    if kind is None:
        refuse_other_family(drafter, name)
        shown = ", ".join(architectures) or "none named"
        raise BastionConfigError(
            f'"model": "{name}" is not a drafter that trees are grown from (architecture: {shown})'
            f": give one that was trained for the target, of the kinds {DRAFTER_NAMES}"
        )
    gamma = kind.gamma(drafter)
    if gamma is None or gamma < 1:
        block_size = getattr(drafter, "block_size", None)
        raise BastionConfigError(
            f'the config of drafter "{name}" has "block_size": {block_size!r}, where a DFlash '
            "checkpoint has a whole number of at least 2: use a complete checkpoint"
        )
    vocab = target.get_vocab_size()
    for check in (*kind.checks, *COMMON_CHECKS):
        refusal = check(drafter, name, vocab)
        if refusal is not None:
            raise BastionConfigError(refusal)
    sizes = {key: getattr(drafter, key, None) for key in ("vocab_size", "draft_vocab_size")}
    for key, own in sizes.items():
        # A drafter may know a part of the target's vocabulary.
        part = key == "draft_vocab_size" and own is not None and own < vocab
        if own not in (None, vocab) and not part:
            raise BastionConfigError(
                f'drafter "{name}" has {key} {own} and the target a vocabulary of {vocab}: use the '
                "drafter that was trained for this target"
            )
    layers = target.get_total_num_hidden_layers()
    beyond = [i for i in layers_read(drafter) if not 0 <= i < layers]
    if beyond:
        raise BastionConfigError(
            f'drafter "{name}" reads target layer {beyond[0]} (target_layer_ids), '
            f"and the target has {layers} layers: use the drafter that was trained for this target"
        )


def check_drafter_weights(
    drafter: Any, keys: dict[str, Any], target: Any, load_format: str
) -> None:
    """Check the tensors in the headers of the drafter's files against its config and the target.

    keys: the user's, checked. load_format: of the drafter's weights.
    """
    name, tensors = keys["model"], None
    if load_format != "dummy":
        for role, model in (("target", target.model), ("drafter", name)):
            if not files.has_weights(model):
                raise BastionConfigError(
                    f"the folder {model} of the {role} has a config.json and no weights: use a "
                    "complete checkpoint"
                )
        try:
            tensors = files.tensors(name, keys.get("revision"))
        except files.UnreadableError as error:
            raise BastionConfigError(f"drafter: {error}") from error
    refusal = misfit(drafter, name, target.get_hidden_size(), target.get_vocab_size(), tensors)
    if refusal is not None:
        raise BastionConfigError(refusal)


def refuse_type(drafter: Any, name: str) -> None:
    """Refuse a drafter of a type that is not served, whatever its architecture.

    drafter: its config, or what is written in it.
    """
    refused = refused_type(drafter)
    if refused is not None:
        raise BastionConfigError(
            f'"model": "{name}" is {refused} drafter, which method "bastion" does not serve: give '
            f"one that was trained for the target, of the kinds {DRAFTER_NAMES}"
        )


def refuse_other_family(drafter: Any, name: str) -> None:
    """Refuse a drafter of a known family that is not served, with what works instead.

    drafter: its config, or what is written in it.
    """
    why = other_family(drafter)
    if why is not None:
        raise BastionConfigError(f'"model": "{name}" {why}')


def check_target(model: Any) -> None:
    """Refuse a target model that a tree cannot be verified on."""
    kinds: set[str] = set(getattr(model.hf_text_config, "layer_types", None) or ())
    linear = "linear_attention" in kinds
    causes: tuple[tuple[Callable[[], Any], str], ...] = (
        (lambda: model.runner_type != "generate", "is a pooling model"),
        (lambda: model.is_encoder_decoder, "is an encoder-decoder"),
        (lambda: model.is_diffusion, "is a diffusion model"),
        (
            lambda: model.is_attention_free or (model.is_hybrid and not linear),
            "has recurrent (Mamba-like) layers",
        ),
        (
            lambda: model.is_hybrid and model.architecture not in _GATED_DELTA,
            f"has recurrent layers in a {model.architecture}; known are the gated delta networks "
            f"in a {' or '.join(_GATED_DELTA)}",
        ),
        (
            lambda: model.is_hybrid and not current_host().serves_gated_delta(),
            "has gated delta networks, which take trees on CPU hosts and NVIDIA GPUs only",
        ),
        (lambda: model.use_mla, "uses multi-head latent attention"),
        (
            lambda: model.attention_chunk_size or "chunked_attention" in kinds,
            "has chunked local attention",
        ),
        (lambda: model.rswa_window, "keeps its prompt beside a sliding window (R-SWA)"),
        (lambda: model.uses_alibi, "uses ALiBi"),
    )
    for applies, what in causes:
        if applies():
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


def read_config(role: str, name: str, revision: str | None = None) -> dict[str, Any] | None:
    """What is written in a model's config.json, see `files.written_config`."""
    try:
        return files.written_config(name, revision)
    except files.UnreadableError as error:
        raise BastionConfigError(f"the {role} cannot be read: {error}") from error


def check_target_file(name: str, written: dict[str, Any]) -> None:
    """Refuse a drafter in the target's place before vLLM fails on it."""
    kind = kind_of(architectures_of(SimpleNamespace(**written)))
    if kind is not None:
        raise BastionConfigError(
            f'"{name}", given as the target, is a drafter ({kind.name}): exchange the two, the '
            'target is the model that is served and the drafter the "model" in speculative_config'
        )


def unknown_target(name: str, written: dict[str, Any]) -> BastionConfigError | None:
    """Our error for a target that vLLM failed on, if vLLM does not have its type."""
    from vllm.model_executor.models import ModelRegistry

    architectures = written.get("architectures") or []
    if not architectures or set(architectures) & set(ModelRegistry.get_supported_archs()):
        return None
    return BastionConfigError(
        f'the target "{name}" is {_shown(written)}, which vLLM {compat.vllm_version()} does not '
        "have: use another target, or a vLLM that has it"
    )


def unknown_drafter(name: str, written: dict[str, Any] | None) -> BastionConfigError:
    """Our error for a drafter whose config vLLM cannot read."""
    return BastionConfigError(
        f'"model": "{name}" is {_shown(written or {})}, which vLLM {compat.vllm_version()} cannot '
        f"read: give a drafter that was trained for the target, of the kinds {DRAFTER_NAMES}"
    )


def _shown(written: dict[str, Any]) -> str:
    """A checkpoint by its architecture and type."""
    names = ", ".join(map(str, written.get("architectures") or ())) or "of no architecture"
    return f"a {names} of model_type {written.get('model_type')!r}"


def check_hidden_states(model: Any) -> None:
    """Refuse a target whose class in vLLM does not give its layers' outputs to a drafter."""
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.interfaces import supports_eagle3

    inner = getattr(model.hf_text_config, "architectures", None)
    for names in (model.architectures, inner):
        if not names or not set(names) & set(ModelRegistry.get_supported_archs()):
            continue
        found, name = ModelRegistry.resolve_model_cls(names, model)
        if not supports_eagle3(found):
            raise BastionConfigError(
                f'the target "{model.model}" is a {name}, which in vLLM gives no drafter its '
                "hidden states: no drafter of any kind works with it, so use another target, or "
                "drop speculative_config"
            )


def thinking_note(target: str, revision: str | None, drafter: str) -> str | None:
    """A note where the drafter was trained on replies without thinking, and the target thinks."""
    if not _WITHOUT_THINKING.search(drafter.rstrip("/")):
        return None
    if "enable_thinking" not in files.chat_template(target, revision):
        return None
    return (
        f'drafter "{drafter}" was trained on replies without thinking, and the chat template of '
        f'"{target}" thinks unless a request says chat_template_kwargs {{"enable_thinking": '
        "false}: with thinking less is accepted"
    )
