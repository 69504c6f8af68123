# SPDX-License-Identifier: Apache-2.0
"""Write wide pairs to the cache folder."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks import TINY
from benchmarks.tiny.drafter import Drafter, load_drafter
from benchmarks.tiny.model import Target, load_target
from benchmarks.widen.widening import SHAPES, Shape, Weights, Widening
from vllm_bastion.envs import cache_dir

_VERSION = 2
SHARD_BYTES = 1 << 30


def make_pair(
    shape: Shape, folder: Path, source: Path = TINY, shard_bytes: int | None = SHARD_BYTES
) -> None:
    """Write `folder`/target and `folder`/drafter.

    Args:
        source: the pair to widen, `target` and `drafter`.
        shard_bytes: None to leave the weights out, for engines that draw them at random.

    Raises:
        ValueError: the shape is too small.
    """
    target, drafter = load_target(source / "target"), load_drafter(source / "drafter")
    wide = Widening(target.dims, shape, target.feature_layers)
    torch.manual_seed(0)
    keys = {"tie_word_embeddings": shape.tie_word_embeddings}
    layers = shape.num_hidden_layers
    _write(wide, wide.target(target), layers, keys, source / "target", folder, shard_bytes)
    _write_drafter(wide, drafter, target, source / "drafter", folder, shard_bytes)


def make_drafter(shape: Shape, folder: Path, kind: str, source: Path = TINY) -> None:
    """Write `folder`/`kind`, another drafter for the pair there.

    Raises ValueError: the shape is too small, or the drafter has a head that cannot be widened.
    """
    target, drafter = load_target(source / "target"), load_drafter(source / kind)
    torch.manual_seed(1)
    wide = Widening(target.dims, shape, target.feature_layers)
    _write_drafter(wide, drafter, target, source / kind, folder, SHARD_BYTES)


def _write_drafter(
    wide: Widening,
    drafter: Drafter,
    target: Target,
    source: Path,
    folder: Path,
    shard_bytes: int | None,
) -> None:
    layers = wide.drafter_layers(drafter)
    keys = {
        "num_target_layers": wide.shape.num_hidden_layers,
        "layer_types": ["full_attention"] * layers,
        "max_window_layers": layers,
    }
    settings = {"target_layer_ids": list(wide.features), **wide.head_settings(drafter)}
    keys["dflash_config"] = {**read_config(source)["dflash_config"], **settings}
    _write(wide, wide.drafter(drafter, target), layers, keys, source, folder, shard_bytes)


def _write(
    wide: Widening,
    weights: Weights,
    layers: int,
    keys: dict[str, Any],
    source: Path,
    folder: Path,
    shard_bytes: int | None,
) -> None:
    out = folder / source.name
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("*.safetensors"))
    if shard_bytes is not None:
        with torch.inference_mode():
            write_weights(weights, out, shard_bytes)
    config = {**read_config(source), **asdict(wide.dims(layers)), **keys}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def source_of(name: str) -> Path:
    """The pair to widen into a shape: SmolLM2's, or the tiny one.

    Raises ValueError: SmolLM2 has not been fetched.
    """
    if not name.startswith("smollm2-"):
        return TINY
    folder = cache_dir() / "pairs" / "smollm2"
    if not (folder / "drafter").exists():
        raise ValueError(f"{name} is SmolLM2, widened: run python -m benchmarks.smollm2 first")
    return folder


def pair_of(name: str, shape: Shape | None = None) -> Path:
    """The cached pair of a known shape or of `shape`, made where it is not there.

    Raises ValueError: see `make_pair` and `source_of`.
    """
    source = source_of(name)
    shape = SHAPES[name] if shape is None else shape
    made_of = _made_of(shape, source, "target", "drafter")
    folder = cache_dir() / "pairs" / name
    note = folder / "pair.json"
    if _known(note, made_of):
        return folder
    part = folder.with_name(f"{folder.name}.part")
    for old in (part, folder):
        shutil.rmtree(old, ignore_errors=True)
    part.mkdir(parents=True)
    make_pair(shape, part, source)
    (part / note.name).write_text(json.dumps(made_of, indent=1) + "\n")
    part.rename(folder)
    return folder


def _made_of(shape: Shape, source: Path, *kinds: str) -> dict[str, Any]:
    files = sorted(path for kind in kinds for path in source.glob(f"{kind}/*"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
    return {"version": _VERSION, "source": digest, "shape": asdict(shape)}


def _known(note: Path, made_of: dict[str, Any]) -> bool:
    if not note.exists():
        return False
    known = json.loads(note.read_text())
    return {key: known.get(key) for key in made_of} == made_of


def drafter_of(name: str, kind: str) -> Path:
    """The cached drafter `kind`, such as `dflash2`, for a pair of a known shape.

    It is written where it is not there, into the pair's folder.

    Raises:
        ValueError: see `make_drafter`.
    """
    shape, folder, source = SHAPES[name], pair_of(name), source_of(name)
    made_of, note = _made_of(shape, source, kind), folder / f"{kind}.json"
    if _known(note, made_of):
        return folder / kind
    note.unlink(missing_ok=True)
    shutil.rmtree(folder / kind, ignore_errors=True)
    make_drafter(shape, folder, kind, source)
    note.write_text(json.dumps(made_of, indent=1) + "\n")
    return folder / kind


def write_weights(weights: Weights, folder: Path, shard_bytes: int) -> None:
    """Write bf16 safetensors in shards of about `shard_bytes`, with at most one in memory."""
    parts: list[Path] = []
    part_of: dict[str, int] = {}
    shard: dict[str, Tensor] = {}
    size = total = 0

    def flush() -> None:
        nonlocal size
        parts.append(folder / f"part-{len(parts)}.safetensors")
        save_file(shard, parts[-1], metadata={"format": "pt"})
        shard.clear()
        size = 0

    for name, weight in weights:
        kind = torch.bfloat16 if weight.is_floating_point() else weight.dtype
        shard[name] = weight.detach().to(kind).contiguous().clone()
        part_of[name] = len(parts)
        size += shard[name].nbytes
        total += shard[name].nbytes
        if size >= shard_bytes:
            flush()
    if shard:
        flush()
    if len(parts) == 1:
        parts[0].rename(folder / "model.safetensors")
        return
    names = [f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors" for i in range(len(parts))]
    for part, name in zip(parts, names, strict=True):
        part.rename(folder / name)
    index = {"metadata": {"total_size": total}}
    index["weight_map"] = {name: names[number] for name, number in part_of.items()}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def read_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())
