# SPDX-License-Identifier: Apache-2.0
"""Write and read wide checkpoints without holding them in memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks.tiny.heads import Domino, Selector
from benchmarks.widen.widening import Dims, Drafter, Layer, Target, Weights

SHARD_BYTES = 1 << 30
_DIMS = tuple(field.name for field in fields(Dims))


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


class Stored:
    """A checkpoint read tensor by tensor."""

    def __init__(self, folder: Path) -> None:
        files = [safe_open(path, framework="pt") for path in sorted(folder.glob("*.safetensors"))]
        self._file = {name: file for file in files for name in file.keys()}  # noqa: SIM118

    def __contains__(self, name: str) -> bool:
        return name in self._file

    def __getitem__(self, name: str) -> Tensor:
        return self._file[name].get_tensor(name)

    def fill(self, module: nn.Module, prefix: str) -> None:
        """Load a module's weights, in its own dtype."""
        module.load_state_dict({name: self[prefix + name] for name in module.state_dict()})


class _Streamed(nn.Module):
    """A list of layers, of which one at a time is in memory."""

    def __init__(self, stored: Stored, prefix: str, dims: Dims) -> None:
        super().__init__()
        self.stored, self.prefix, self.count = stored, prefix, dims.num_hidden_layers
        self.layer = Layer(dims)

    def __iter__(self) -> Iterator[Layer]:
        for i in range(self.count):
            self.stored.fill(self.layer, f"{self.prefix}.{i}.")
            yield self.layer


class _Embedding(nn.Module):
    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, ids: Tensor) -> Tensor:
        return self.rows[ids].float()


def open_pair(folder: Path, kind: str = "drafter") -> tuple[Target, Drafter, Tensor]:
    """Open a pair with the models of `benchmarks/tiny`, in float32 with one layer in memory.

    `kind` is the drafter's folder.

    Returns the target, the drafter and the head's bf16 weights [V, H].
    """
    stored, drafted = Stored(folder / "target"), Stored(folder / kind)
    own, theirs = (read_config(folder / name) for name in ("target", kind))
    dims, drafter_dims = (Dims(**{n: c[n] for n in _DIMS}) for c in (own, theirs))
    target = Target(replace(dims, num_hidden_layers=0, vocab_size=1))
    target.embed_tokens = _Embedding(stored["model.embed_tokens.weight"])
    target.layers = _Streamed(stored, "model.layers", dims)
    stored.fill(target.norm, "model.norm.")
    settings = theirs["dflash_config"]
    drafter = Drafter(replace(drafter_dims, num_hidden_layers=0), settings["mask_token_id"])
    fc = drafted["fc.weight"]
    drafter.fc = nn.Linear(fc.shape[1], fc.shape[0], bias=False)
    drafter.layers = _Streamed(drafted, "layers", drafter_dims)
    for name in ("fc", "hidden_norm", "norm"):
        drafted.fill(getattr(drafter, name), f"{name}.")
    if "emb_dim" in settings:
        sizes = settings["emb_dim"], settings["gru_hidden_dim"]
        drafter.domino = Domino(drafter_dims, *sizes)
        drafted.fill(drafter.domino, "")
    elif "selector_rank" in settings:
        drafter.candidate_selector = Selector(drafter_dims, settings["selector_rank"])
        drafted.fill(drafter.candidate_selector, f"{Selector.name}.")
    head = "lm_head.weight" if "lm_head.weight" in stored else "model.embed_tokens.weight"
    return target.eval(), drafter.eval(), stored[head]


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json in a folder."""
    return json.loads((folder / "config.json").read_text())
