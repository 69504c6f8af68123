# SPDX-License-Identifier: Apache-2.0
"""Write and read the checkpoints of the targets."""

from __future__ import annotations

import json
from pathlib import Path

from hybrid import ARCHITECTURE, HybridTarget, load_hybrid
from model import Dims, Target, hf_config, save_bf16
from safetensors.torch import load_file

AnyTarget = Target | HybridTarget


def save_target(model: AnyTarget, folder: Path, eos_id: int) -> None:
    """Write the target's checkpoint (the tokenizer is saved separately)."""
    if isinstance(model, HybridTarget):
        model.save(folder)
    else:
        save_qwen3(model, folder, eos_id)
    generation = {"do_sample": False, "eos_token_id": eos_id, "pad_token_id": eos_id}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def save_qwen3(model: Target, folder: Path, eos_id: int) -> None:
    """Write config.json and weights of a Qwen3ForCausalLM."""
    config = hf_config(
        model.dims,
        architectures=["Qwen3ForCausalLM"],
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos_id,
        pad_token_id=eos_id,
    )
    save_bf16({"model." + n: w for n, w in model.state_dict().items()}, folder, config)


def load_target(folder: Path, device: str = "cpu") -> AnyTarget:
    """Read what `save_target` wrote, or a Llama model with a tied head, in float32.

    Weights are stored in bf16. A Llama's drafters read three of its layers: the second, the third
    from the last, and the middle one between them.
    """
    config = json.loads((folder / "config.json").read_text())
    if config["architectures"] == [ARCHITECTURE]:
        return load_hybrid(folder, device)
    dims = Dims(**{k: config[k] for k in Dims.__dataclass_fields__})
    llama = config["architectures"] == ["LlamaForCausalLM"]
    model = Target(dims, head_norms=not llama)
    if llama:
        last = dims.num_hidden_layers - 3
        model.feature_layers = (1, (1 + last) // 2, last)
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({n.removeprefix("model."): w.float() for n, w in weights.items()})
    return model.to(device).eval()
