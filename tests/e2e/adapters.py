# SPDX-License-Identifier: Apache-2.0
"""Random adapters of the tiny target."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

RANK, _LAYERS = 8, 6
# Outputs and inputs of the layers that have an adapter.
_SIZES = {
    "self_attn.q_proj": (192, 192), "self_attn.v_proj": (64, 192), "self_attn.o_proj": (192, 192),
    "mlp.gate_proj": (512, 192), "mlp.down_proj": (192, 512),
}  # fmt: skip


def make_adapter(target: str, folder: Path, seed: int, head: bool = False) -> str:
    """Write an adapter in PEFT's format, large enough to change the target's texts."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    names = {
        f"model.layers.{i}.{name}": size for i in range(_LAYERS) for name, size in _SIZES.items()
    }
    if head:
        names["lm_head"] = 1024, 192
    weights = {}
    for name, (outputs, inputs) in names.items():
        for side, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
            values = torch.randn(shape, generator=generator) * 0.1
            weights[f"base_model.model.{name}.lora_{side}.weight"] = values
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": target, "r": RANK,
        "lora_alpha": RANK, "bias": "none",
        "target_modules": sorted({name.rpartition(".")[2] for name in names}),
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)
