# SPDX-License-Identifier: Apache-2.0
"""Write wide pairs to the cache folder."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import torch
from checkpoints import load_target
from drafter import load_drafter
from torch import Tensor

from benchmarks import TINY
from benchmarks.widen.check import Distance, check, held_out
from benchmarks.widen.checkpoint import SHARD_BYTES, read_config, write_weights
from benchmarks.widen.widening import SHAPES, TARGET_LAYER_IDS, Shape, Widening
from vllm_bastion.envs import cache_dir

_VERSION = 1


def make_pair(
    shape: Shape,
    folder: Path,
    source: Path = TINY,
    ids: Tensor | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> dict[str, Distance]:
    """Write `folder`/target and `folder`/drafter, and check them.

    Args:
        source: the pair to widen: `target`, `drafter` and, without `ids`,
            `prompts.jsonl`.
        ids: [B, T] text for the check.

    Raises:
        ValueError: the shape is too small.
        RuntimeError: what was written does not compute the source's function.
    """
    target, drafter = load_target(source / "target"), load_drafter(source / "drafter")
    wide = Widening(target.dims, shape)
    torch.manual_seed(0)
    for kind, weights, layers, keys in (
        (
            "target",
            wide.target(target),
            shape.num_hidden_layers,
            {"tie_word_embeddings": shape.tie_word_embeddings},
        ),
        (
            "drafter",
            wide.drafter(drafter),
            wide.drafter_layers(drafter),
            {
                "num_target_layers": shape.num_hidden_layers,
                "layer_types": ["full_attention"] * wide.drafter_layers(drafter),
                "max_window_layers": wide.drafter_layers(drafter),
            },
        ),
    ):
        shutil.copytree(
            source / kind, folder / kind, ignore=shutil.ignore_patterns("*.safetensors")
        )
        with torch.inference_mode():
            write_weights(weights, folder / kind, shard_bytes)
        config = {**read_config(source / kind), **asdict(wide.dims(layers)), **keys}
        if kind == "drafter":
            config["dflash_config"]["target_layer_ids"] = list(wide.features)
        (folder / kind / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    ids = held_out(source) if ids is None else ids
    found = check((target, drafter), folder, ids, TARGET_LAYER_IDS)
    for kind, result in found.items():
        if result.problem is not None:
            raise RuntimeError(f"the wide {kind} is not the tiny one: {result.problem}")
    return found


def pair(name: str, shape: Shape, again: bool = False) -> Path:
    """The cached pair of that name, made where it is not there.

    Raises:
        ValueError, RuntimeError: see `make_pair`.
    """
    files = sorted([*TINY.glob("target/*"), *TINY.glob("drafter/*")])
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
    made_of = {"version": _VERSION, "source": digest, "shape": asdict(shape)}
    folder = cache_dir() / "pairs" / name
    note = folder / "pair.json"
    if note.exists() and not again:
        known = json.loads(note.read_text())
        if {key: known.get(key) for key in made_of} == made_of:
            return folder
    part = folder.with_name(f"{folder.name}.part")
    for old in (part, folder):
        shutil.rmtree(old, ignore_errors=True)
    part.mkdir(parents=True)
    found = make_pair(shape, part)
    checks = {kind: asdict(result) for kind, result in found.items()}
    (part / note.name).write_text(json.dumps({**made_of, "check": checks}, indent=1) + "\n")
    part.rename(folder)
    return folder


def pair_of(
    name: str,
    shape: Shape | None = None,
    *,
    keep_vocabulary: bool = False,
    drafter_layers: int | None = None,
    again: bool = False,
) -> Path:
    """The cached pair of a known shape or of `shape`; its name shows the other options."""
    shape = SHAPES[name] if shape is None else shape
    if keep_vocabulary:
        vocab = json.loads((TINY / "target" / "config.json").read_text())["vocab_size"]
        name, shape = f"{name}-v{vocab}", replace(shape, vocab_size=vocab)
    if drafter_layers is not None:
        name, shape = f"{name}-d{drafter_layers}", replace(shape, drafter_layers=drafter_layers)
    return pair(name, shape, again)
