# SPDX-License-Identifier: Apache-2.0
"""A model's config.json and the headers of its files, in a folder or on Hugging Face.

Models are named by folder or Hugging Face name, with the revision there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from vllm_bastion import envs

_HEADERS = "*.safetensors"
_FORMATS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
# Prefixes of names whose files only vLLM reads.
_REMOTE = ("s3://", "gs://", "az://", "hf://")


@dataclass(frozen=True)
class Tensor:
    """A tensor as a safetensors header names it; dtype such as "BF16"."""

    dtype: str
    shape: tuple[int, ...]


class UnreadableError(ValueError):
    """A model whose config.json cannot be read. The text says why and what to do instead."""


class UnreachableError(UnreadableError):
    """A model that would have to be downloaded, and cannot be."""


def written_config(model: str, revision: str | None = None) -> dict[str, Any] | None:
    """The content of a model's config.json; None for a model in another format or on another host.

    Raises:
        UnreadableError: in one sentence, without a model's role.
    """
    if model.startswith(_REMOTE) or envs.uses_modelscope():
        return None
    path = Path(model).expanduser()
    if path.suffix == ".gguf" or (path / "params.json").is_file():
        return None
    if path.is_dir():
        file = path / "config.json"
        if not file.is_file():
            raise UnreadableError(
                f"the folder {model} has no config.json: give the folder that a model's "
                "config.json and weights are in"
            )
    elif path.exists():
        raise UnreadableError(f"{model} is a file: give the folder that it is in")
    elif not is_name(model):
        raise UnreadableError(
            f"there is no folder {model}: give a model's folder or its Hugging Face name"
        )
    else:
        found = _downloaded(model, revision)
        if isinstance(found, UnreadableError):
            raise found
        file = found
    try:
        written = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnreadableError(
            f"{file} is not valid JSON ({str(error).splitlines()[0]}): use a complete checkpoint"
        ) from error
    if not isinstance(written, dict):
        raise UnreadableError(f"{file} is not a model's config: use a complete checkpoint")
    return written


def chat_template(model: str, revision: str | None = None) -> str:
    """A model's chat template, if its files are in a folder or in this machine's cache; else ""."""
    from huggingface_hub import hf_hub_download

    folder = Path(model).expanduser()
    found = []
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        file = folder / name
        try:
            if not folder.is_dir():
                file = Path(hf_hub_download(model, name, revision=revision, local_files_only=True))
            text = file.read_text(encoding="utf-8")
            found.append(text if file.suffix == ".jinja" else json.loads(text).get("chat_template"))
        except Exception:  # vLLM raises when it loads the tokenizer
            continue
    return next((text for text in found if isinstance(text, str)), "")


def check_readable(role: str, model: str) -> None:
    """Raise UnreadableError, with the model's role, unless its config.json can be read."""
    try:
        written_config(model)
    except UnreadableError as error:
        raise type(error)(f"the {role} cannot be read: {error}") from error


def is_name(model: str) -> bool:
    """Whether a model can only be a name, on Hugging Face or another host."""
    folder = model.startswith(("/", "./", "../", "~")) or model.count("/") > 1
    remote = model.startswith(_REMOTE)
    return remote or not (folder or Path(model).expanduser().exists())


@cache
def _downloaded(model: str, revision: str | None) -> Path | UnreadableError:
    """The config.json of a name, or why there is none. Cached: it is slow without a network."""
    from huggingface_hub import constants, errors, hf_hub_download

    try:
        return Path(hf_hub_download(model, "config.json", revision=revision))
    except errors.LocalEntryNotFoundError:
        if constants.HF_HUB_OFFLINE:
            why = "HF_HUB_OFFLINE forbids its download: unset that variable, or give a folder"
        else:
            why = "Hugging Face cannot be reached: connect to the network, or give a folder"
        return UnreachableError(f"{model} is neither a folder nor cached here, and {why}")
    except errors.HFValidationError:
        why = "is neither a folder here nor a name on Hugging Face: check the spelling"
    except errors.GatedRepoError:
        why = "requires its licence to be accepted: do so on its page, and set HF_TOKEN"
    except errors.RepositoryNotFoundError:
        why = (
            "is not a model that you can read on Hugging Face: check the spelling, or set HF_TOKEN "
            "for a private one"
        )
    except errors.RevisionNotFoundError:
        why = f"has no revision {revision} on Hugging Face: name another"
    except errors.EntryNotFoundError:
        why = "has no config.json on Hugging Face: name a model in Hugging Face's format"
    except Exception as error:  # of the network
        why = f"could not be read from Hugging Face ({type(error).__name__}): try again"
    return UnreadableError(f"{model} {why}")


def tensors(model: str, revision: str | None = None) -> dict[str, Tensor] | None:
    """A model's tensors by name, from the headers of its safetensors files.

    None if there are no such files, or they cannot be read from here.

    Raises:
        UnreadableError: a file in a folder is not a safetensors file.
    """
    folder = _folder(model, revision)
    files = sorted(folder.glob(_HEADERS)) if folder is not None else []
    if files:
        return {name: one for file in files for name, one in _header(file).items()}
    if folder is not None and Path(model).expanduser().is_dir():
        return None
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        return None
    try:
        found = HfApi().get_safetensors_metadata(model, revision=revision)
    except Exception:  # another format, or no network: vLLM raises when it loads the model
        return None
    return {
        name: Tensor(one.dtype, tuple(one.shape))
        for file in found.files_metadata.values()
        for name, one in file.tensors.items()
    }


def elements(model: str, revision: str | None = None) -> int | None:
    """Numbers in a model's weights; None if unknown."""
    found = tensors(model, revision)
    return None if found is None else sum(prod(one.shape) for one in found.values())


def has_weights(model: str) -> bool:
    """False for a folder without any file of weights."""
    path = Path(model).expanduser()
    return not path.is_dir() or any(any(path.glob(name)) for name in _FORMATS)


def _folder(model: str, revision: str | None) -> Path | None:
    """The model's folder, or its snapshot in Hugging Face's cache."""
    if Path(model).expanduser().is_dir():
        return Path(model).expanduser()
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                model, revision=revision, allow_patterns=[_HEADERS], local_files_only=True
            )
        )
    except Exception:
        return None


def _header(file: Path) -> dict[str, Tensor]:
    """The tensors in a safetensors file; its header is a length and JSON."""
    with file.open("rb") as stream:
        begin = stream.read(8)
        header = stream.read(min(int.from_bytes(begin, "little"), file.stat().st_size))
    try:
        return {
            name: Tensor(one["dtype"], tuple(one["shape"]))
            for name, one in json.loads(header).items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = "a pointer of Git LFS" if begin == b"version " else "damaged"
        raise UnreadableError(f"{file} is {what}, not safetensors: download it again") from error
