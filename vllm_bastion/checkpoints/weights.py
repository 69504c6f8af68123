# SPDX-License-Identifier: Apache-2.0
"""Which tensors a drafter's files must have: vLLM leaves missing ones uninitialised.

All types of drafters share DFlash's backbone, whose tensors are named here. Shapes are vLLM's to
compare.
"""

from __future__ import annotations

import re
from collections.abc import Set
from pathlib import Path
from typing import Any

_HEADERS = "*.safetensors"
_PARTS = (
    *(f"self_attn.{one}_proj" for one in "qkvo"),
    *(f"mlp.{one}_proj" for one in ("gate", "up", "down")),
)
_THE_RIGHT_ONE = "use the drafter that was trained for this target"


def misfit(
    config: Any, name: str, revision: str | None, hidden_size: int, vocab: int
) -> str | None:
    """Why a drafter's weights fit neither its config nor its target, in one sentence, or None.

    Args:
        config: the drafter's Hugging Face config.
        name: its folder or Hugging Face name, with the revision there.
        revision: on Hugging Face.
        hidden_size: of the target.
        vocab: of the target.
    """
    read = getattr(config, "target_hidden_size", None) or config.hidden_size
    if read != hidden_size:
        return (
            f'drafter "{name}" reads hidden states of size {read}, and the target has '
            f"{hidden_size}: {_THE_RIGHT_ONE}"
        )
    names = tensor_names(name, revision)
    if not names:
        return None
    shared = _missing(names, "embed_tokens", "lm_head")
    if shared and config.hidden_size != hidden_size:
        return (
            f'drafter "{name}" has no {shared} of its own and hidden_size {config.hidden_size}, '
            f"and the target's has {hidden_size}: {_THE_RIGHT_ONE}"
        )
    own = getattr(config, "draft_vocab_size", None) or vocab
    if own < vocab and (lost := _missing(names, "lm_head", "d2t")):
        return (
            f'drafter "{name}" has draft_vocab_size {own} of the target\'s {vocab} tokens and no '
            f"{lost} in its files: use a complete checkpoint"
        )
    modules = {one.rpartition(".")[0] for one in names}  # a quantised layer has no `weight`
    layers = range(config.num_hidden_layers)
    expected = [f"layers.{layer}.{part}" for layer in layers for part in _PARTS]
    absent = [one for one in expected if one not in modules]
    if absent and expected[0] in modules:  # a fused drafter has other names
        more = f" and {len(absent) - 1} others" if len(absent) > 1 else ""
        return (
            f'the files of drafter "{name}" lack {absent[0]}.weight{more}, which its config names: '
            "use a complete checkpoint"
        )
    return None


def name_whole_layers(config: Any, first: int) -> None:
    """List the layers that a quantised drafter keeps whole by vLLM's names, too.

    vLLM numbers a drafter's layers after the target's and joins some of them. A layer that it does
    not find in the list is read as a quantised one: then drafts are noise, and nothing says so.

    Args:
        config: the drafter's, changed in place.
        first: the number that vLLM gives the drafter's first layer.
    """
    settings = getattr(config, "quantization_config", None) or {}
    for key in ("ignore", "ignored_layers", "modules_to_not_convert"):
        listed = settings.get(key) or []
        for name in listed[:]:
            layer = re.match(r"layers\.(\d+)(?=\.)", name := name.removeprefix("model."))
            if layer and int(layer[1]) < config.num_hidden_layers:
                name = f"layers.{first + int(layer[1])}{name[layer.end() :]}"
            name = name.replace(".q_proj", ".qkv_proj").replace(".gate_proj", ".gate_up_proj")
            listed.append(f"model.{name}")


def _missing(names: Set[str], *parts: str) -> str:
    found = {part for name in names for part in name.split(".")}
    return " and no ".join(part for part in parts if part not in found)


def tensor_names(model: str, revision: str | None) -> Set[str]:
    """Names in the headers of a model's safetensors files; empty if they cannot be read here."""
    from huggingface_hub import HfApi, constants, snapshot_download
    from safetensors import safe_open

    folder = Path(model).expanduser()
    try:
        if not folder.is_dir():
            folder = Path(snapshot_download(model, revision=revision, local_files_only=True))
        names: set[str] = set()
        for file in folder.glob(_HEADERS):
            with safe_open(file, "pt") as opened:
                names.update(opened.keys())
        if not names and not constants.HF_HUB_OFFLINE and not Path(model).expanduser().is_dir():
            names.update(HfApi().get_safetensors_metadata(model, revision=revision).weight_map)
        return names
    except Exception:  # another format, damaged, or no network: vLLM raises when it loads the model
        return frozenset()
