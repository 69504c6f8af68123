# SPDX-License-Identifier: Apache-2.0
"""Write wide checkpoints without holding them in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.widen.widening import Weights

SHARD_BYTES = 1 << 30


def write_weights(weights: Weights, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
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
        shard[name] = weight.detach().to(torch.bfloat16).contiguous().clone()
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
