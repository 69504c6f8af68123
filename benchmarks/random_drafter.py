# SPDX-License-Identifier: Apache-2.0
"""A drafter that is never right: a checkpoint's shapes and the spread of its weights, untrained."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def write_random(source: Path, out: Path) -> Path:
    """A copy of a drafter whose matrices are random, with the mean square of its own."""
    shutil.copytree(source, out, dirs_exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    weights = load_file(source / "model.safetensors")
    for name, weight in weights.items():
        if weight.ndim == 2:
            noise = torch.randn(weight.shape, generator=generator)
            weights[name] = (noise * weight.float().square().mean().sqrt()).to(weight.dtype)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out
