# SPDX-License-Identifier: Apache-2.0
"""The pair's folder: the target, and this repository's drafter with the target's head."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from benchmarks.smollm2.target import CannotFetch, fetch, pair_folder

OURS = Path(__file__).resolve().parent / "drafter"
_HEAD = "lm_head.weight"


def pair(wheel: str | None = None) -> Path:
    """The folder of `target` and `drafter`, after writing what is missing or has changed.

    Raises:
        CannotFetch: see `fetch`; or this checkout has no drafter.
    """
    target = fetch(wheel)
    if not OURS.exists():
        raise CannotFetch(f"no drafter is in {OURS}: train one with --publish ({OURS.parent.name})")
    install(OURS, target, pair_folder() / "drafter")
    return pair_folder()


def install(compact: Path, target: Path, folder: Path) -> None:
    """Write a compact drafter to a folder, with its head, unless that is there already."""
    wanted = _digest(compact)
    note = folder / "source.sha256"
    if note.exists() and note.read_text() == wanted:
        return
    import torch
    from safetensors.torch import load_file, safe_open, save_file

    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(compact, part)
    weights = load_file(compact / "model.safetensors")
    with safe_open(target / "model.safetensors", "pt") as file:
        embedding = file.get_tensor("model.embed_tokens.weight")
    weights[_HEAD] = embedding[weights["d2t"] + torch.arange(len(weights["d2t"]))]
    save_file(weights, part / "model.safetensors", metadata={"format": "pt"})
    (part / note.name).write_text(wanted)
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)


def write_compact(drafter: Path, folder: Path) -> None:
    """Write a trained drafter without its head, as this repository stores it."""
    from safetensors.torch import load_file, save_file

    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(drafter, folder)
    weights = load_file(drafter / "model.safetensors")
    del weights[_HEAD]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _digest(folder: Path) -> str:
    parts = [(folder / name).read_bytes() for name in ("config.json", "model.safetensors")]
    return hashlib.sha256(b"".join(parts)).hexdigest()
