# SPDX-License-Identifier: Apache-2.0
"""The pair's folder: the target, and this repository's drafters.

DFlash's has the target's head for the tokens that it drafts. DFlash2 has the same weights, the
whole vocabulary and a selector; of it the repository stores what DFlash does not have.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path

from benchmarks.smollm2.target import CannotFetch, fetch, pair_folder

OURS = Path(__file__).resolve().parent / "drafter"
SELECTOR = OURS.with_name("dflash2")
_HEAD, _PLACES = "lm_head.weight", "d2t"


def pair(wheel: str | None = None) -> Path:
    """The folder of target and drafters, after writing what is missing or has changed.

    Raises CannotFetch: see `fetch`; or this checkout has no drafter.
    """
    target = fetch(wheel)
    if not OURS.exists():
        raise CannotFetch(f"no drafter is in {OURS}: train one with --publish ({OURS.parent.name})")
    install([OURS], target, pair_folder() / OURS.name)
    if (SELECTOR / "config.json").exists():  # a sparse checkout leaves an empty folder
        install([OURS, SELECTOR], target, pair_folder() / SELECTOR.name)
    return pair_folder()


def install(parts: Sequence[Path], target: Path, folder: Path) -> None:
    """Write a drafter to a folder, unless that is there already.

    parts: compact folders, of which the last has the config, and whose weights belong together.
    """
    wanted = _digest(parts)
    note = folder / "source.sha256"
    if note.exists() and note.read_text() == wanted:
        return
    import torch
    from safetensors.torch import load_file, safe_open, save_file

    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(parts[-1], part)
    weights = {}
    for compact in parts:
        weights |= load_file(compact / "model.safetensors")
    offsets = weights[_PLACES]
    if len(parts) > 1:  # with a selector, which drafts the whole vocabulary
        del weights[_PLACES]
    else:
        with safe_open(target / "model.safetensors", "pt") as file:
            embedding = file.get_tensor("model.embed_tokens.weight")
        weights[_HEAD] = embedding[offsets + torch.arange(len(offsets))]
    save_file(weights, part / "model.safetensors", metadata={"format": "pt"})
    (part / note.name).write_text(wanted)
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)


def write_compact(drafter: Path, folder: Path, base: Path | None = None) -> None:
    """Write a trained drafter as this repository stores it.

    base: a compact folder whose weights are left out; None: only the head is.
    """
    from safetensors.torch import load_file, save_file

    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(drafter, folder)
    weights = load_file(drafter / "model.safetensors")
    weights.pop(_HEAD, None)
    if base is not None:
        known = load_file(base / "model.safetensors")
        weights = {name: weight for name, weight in weights.items() if name not in known}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _digest(folders: Sequence[Path]) -> str:
    names = ("config.json", "model.safetensors")
    parts = [(folder / name).read_bytes() for folder in folders for name in names]
    return hashlib.sha256(b"".join(parts)).hexdigest()
