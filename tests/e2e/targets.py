# SPDX-License-Identifier: Apache-2.0
"""Small targets of other architectures with random weights, for the tiny drafter.

They have the tiny target's vocabulary, hidden size, key heads and number of layers, so the drafter
runs on their hidden states; its drafts are no better than random.
"""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.e2e.engines import PAIR, TARGET, Engine

LAYERS = 6
_SIZES: dict[str, Any] = {
    "vocab_size": 1024, "hidden_size": 192, "intermediate_size": 256, "num_hidden_layers": LAYERS,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 4096,
    "initializer_range": 0.15,  # large enough that the best token depends on the text
    "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
_MIXED = {"layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2)}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

_DELTA_NETS = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 64,
    "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4,
}  # fmt: skip
_QWEN_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_SHARED_EXPERTS = {**_QWEN_EXPERTS, "shared_expert_intermediate_size": 64}
_MROPE = {
    "rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 1.0,
    "mrope_section": [8, 4, 4], "mrope_interleaved": True,
}  # fmt: skip
_QWEN3_5: dict[str, Any] = {**_DELTA_NETS, "rope_parameters": _MROPE}
_VISION = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2,
    "out_hidden_size": _SIZES["hidden_size"], "num_position_embeddings": 16,
}  # fmt: skip
_GEMMA_4: dict[str, Any] = {
    "global_head_dim": 64, "sliding_window": 24, "final_logit_softcapping": 30.0,
    "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 2,
    "tie_word_embeddings": False,  # otherwise every token repeats itself
    "vocab_size_per_layer_input": _SIZES["vocab_size"],
}  # fmt: skip
_SHARED_KEYS = {"num_kv_shared_layers": 3, "hidden_size_per_layer_input": 16}
_ONE_PROJECTION = {
    "attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0,
}  # fmt: skip
# The last four tokens of the vocabulary in a target with images.
_IMAGE_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
VISION_START, VISION_END, IMAGE, _VIDEO = range(1020, 1024)
_IMAGE_IDS = {
    "image_token_id": IMAGE, "video_token_id": _VIDEO,
    "vision_start_token_id": VISION_START, "vision_end_token_id": VISION_END,
}  # fmt: skip
_QWEN3_VL = {
    "text_config": _SIZES | {"rope_parameters": _MROPE},
    "vision_config": _VISION | {"depth": 3, "deepstack_visual_indexes": [0, 1]},
    **_IMAGE_IDS,
}
_MUSE_VISION = {
    "num_hidden_layers": 1, "num_attention_heads": 2, "output_dim": 128, "adapter_dim": 32,
}  # fmt: skip
_MUSE_GLIMMER = {
    "text_config": _SIZES | {"sliding_window": 24}, "vision_config": _VISION | _MUSE_VISION,
    "out_hidden_size": 128, "projector_hidden_size": 32, **_IMAGE_IDS,
}  # fmt: skip
_MINIMAX_M2 = {**_EXPERTS, "rotary_dim": 16, "scoring_func": "sigmoid", "use_routing_bias": True}
# The sizes of an image that a processor passes on, in pixels: 4 to 16 tokens.
_PIXELS = {"shortest_edge": 64 * 64, "longest_edge": 128 * 128}

# name -> Hugging Face's model type and further config values
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral-window-24": ("mistral", {"sliding_window": 24}),
    "qwen3-moe": ("qwen3_moe", _QWEN_EXPERTS),
    "qwen3-next": ("qwen3_next", {**_DELTA_NETS, **_SHARED_EXPERTS, "partial_rotary_factor": 0.5}),
    "qwen3.5": ("qwen3_5_text", _QWEN3_5),
    "qwen3.5-moe": ("qwen3_5_moe_text", _QWEN3_5 | _SHARED_EXPERTS),
    "qwen3.5-with-images": (
        "qwen3_5",
        {"text_config": _SIZES | _QWEN3_5, "vision_config": _VISION, **_IMAGE_IDS},
    ),
    "qwen3-vl": ("qwen3_vl", _QWEN3_VL),
    "muse-glimmer": ("muse_glimmer", _MUSE_GLIMMER),
    "minimax-m2": ("minimax_m2", _MINIMAX_M2),
    # As the larger models: one projection for keys and values.
    "gemma-4": ("gemma4_text", _GEMMA_4 | _ONE_PROJECTION),
    # As the smaller ones: layers that read other layers' keys, embeddings for each layer.
    "gemma-4-shared-keys": ("gemma4_text", _GEMMA_4 | _SHARED_KEYS),
    **{
        f"gpt-oss-window-{window}": ("gpt_oss", {"sliding_window": window, **_EXPERTS, **_MIXED})
        for window in (16, 128)
    },
}

# Arguments of `LLM`, and further keys of the spec, that a target needs.
HYBRID: dict[str, Any] = {"enable_prefix_caching": False}
_TEXT_ONLY = {"language_model_only": True}
_ARGUMENTS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen3-next", "qwen3.5", "qwen3.5-moe"), HYBRID),
    "qwen3.5-with-images": HYBRID | _TEXT_ONLY,
    **dict.fromkeys(("qwen3-vl", "muse-glimmer"), _TEXT_ONLY),
}
# With images.
IMAGES: dict[str, Any] = {"limit_mm_per_prompt": {"image": 2, "video": 0}}
_FP32 = "tests.e2e.gdn_fp32:install"
_TORCHVISION = "tests.e2e.torchvision_python:install"
SPEC: dict[str, dict[str, Any]] = {
    "qwen3-next": {"setup": [_FP32]},
    **{name: {"setup": [_TORCHVISION, _FP32]} for name in TARGETS if name.startswith("qwen3.5")},
    **{name: {"setup": [_TORCHVISION]} for name in ("qwen3-vl", "muse-glimmer")},
    "minimax-m2": {"setup": ["tests.e2e.targets:route_in_one_group"]},
}


def engine_of(name: str, folder: Path) -> Engine:
    """Plain decoding with a target that is written to a folder."""
    arguments = _ARGUMENTS.get(name, {})
    return Engine(eager=True, num_blocks=160).of(model=make_target(name, folder), **arguments)


def hybrid_pair() -> tuple[Engine, dict[str, str]]:
    """Plain decoding with the trained hybrid target in bf16, and its drafter as a key."""
    target, drafter = (str(PAIR / "hybrid" / name) for name in ("target", "drafter"))
    return Engine(eager=True).of(model=target, dtype="bfloat16", **HYBRID), {"model": drafter}


def route_in_one_group() -> None:
    """MiniMax's experts, scored by a sigmoid, which vLLM's router on CPUs does in groups only."""
    from vllm.model_executor.models import minimax_m2 as model

    group = {"use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1}
    model.FusedMoEFactory = partial(model.FusedMoEFactory, **group)


def make_target(name: str, folder: Path, **changes: Any) -> str:
    """Write the checkpoint of `TARGETS[name]` with the tiny target's tokenizer to a folder.

    changes: to the values of its config.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    kind, settings = TARGETS[name]
    settings = settings | changes
    with_images = "vision_config" in settings
    loader = AutoModelForImageTextToText if with_images else AutoModelForCausalLM
    config = AutoConfig.for_model(kind, **(settings if with_images else _SIZES | settings))
    torch.manual_seed(0)
    model = loader.from_config(config, dtype=torch.float32)
    for key, parameter in [*model.named_parameters(), *model.named_buffers()]:
        if "sinks" in key:
            torch.nn.init.normal_(parameter, std=2.0)
        elif "q_norm" in key or "k_norm" in key:
            parameter.data += 1  # sharp attention, so that positions matter
        elif "bias" in key:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(TARGET) / file, folder)
    if with_images:
        _add_images(folder)
    return str(folder)


def _add_images(folder: Path) -> None:
    """Give the tokenizer image tokens in place of its last ones, and write the processors."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    by_id = {token: text for text, token in vocab.items()}
    for at, text in enumerate(_IMAGE_TOKENS):
        token = VISION_START + at
        assert "".join(merges.pop()) in [by_id[t] for t in range(VISION_START, _VIDEO + 1)]
        del vocab[by_id[token]]
        vocab[text] = token
        added = tokenizer["added_tokens"]
        added.append(added[0] | {"id": token, "content": text})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    sizes = {"size": _PIXELS, "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}
    shared = {"processor_class": "Qwen3VLProcessor", **sizes}
    for file, key, kind in (
        ("preprocessor_config.json", "image_processor_type", "Qwen2VLImageProcessor"),
        ("video_preprocessor_config.json", "video_processor_type", "Qwen3VLVideoProcessor"),
    ):
        (folder / file).write_text(json.dumps(shared | {key: kind}))


def write_quantised(
    weights: dict[str, torch.Tensor], settings: Any, folder: Path, model: str = TARGET
) -> str:
    """Write a model with these weights and this `quantization_config` to a folder."""
    shutil.copytree(model, folder, dirs_exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return str(folder)


def make_scaled(folder: Path) -> str:
    """The tiny target in llm-compressor's format: with a scale of each layer's keys and values."""
    weights = load_file(Path(TARGET) / "model.safetensors")
    for layer in range(LAYERS):
        name = f"model.layers.{layer}.self_attn"
        weights[f"{name}.k_scale"] = torch.tensor([0.011 + 0.003 * layer])
        weights[f"{name}.v_scale"] = torch.tensor([0.017 - 0.002 * layer])
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
    settings = {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "config_groups": {},
        "kv_cache_scheme": scheme | {"dynamic": False},
    }
    return write_quantised(weights, settings, folder)
