# SPDX-License-Identifier: Apache-2.0
"""What the questions decode: engines of real shapes, or small ones for the simulated GPU."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks import TINY
from benchmarks.e2e.methods import Target, gpu_share
from benchmarks.gpu.quarter.job import Job
from benchmarks.harness.engine import GAMMA, Request, UserEngine
from benchmarks.harness.switched import Switched
from benchmarks.prompts import DOMAINS, load_prompts
from benchmarks.widen import SHAPES, pair_of

LOOKUP = "adaptive, lookup"  # the mode of `with_lookup`
# Without torch.compile, whose code the emulation cannot run, and in the type that Triton's
# interpreter multiplies rightly.
SMALL: dict[str, Any] = {
    "dtype": "float16",
    "memory": 0.02,
    "more": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}},
}
# The published configurations of Qwen3-8B and of its DFlash drafter (5 layers, block 16).
_SIZES = {name: size for name, size in asdict(SHAPES["8B"]).items() if name != "drafter_layers"}
_QWEN3_8B: dict[str, Any] = {
    **_SIZES,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
_QWEN3_8B_DRAFTER = {
    **_QWEN3_8B,
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 5,
    "num_target_layers": 36,
    "layer_types": ["full_attention"] * 5,
    "block_size": GAMMA + 1,
    "dflash_config": {"target_layer_ids": [1, 9, 17, 25, 33], "mask_token_id": 151669},
}
# The published configuration of Qwen3-30B-A3B, and a drafter of its width.
_EXPERTS = {
    **_QWEN3_8B,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 8,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
_EXPERTS_DRAFTER = {
    **_QWEN3_8B_DRAFTER,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_key_value_heads": 4,
    "num_target_layers": 8,
    "dflash_config": {"target_layer_ids": [1, 2, 4, 5, 6], "mask_token_id": 151669},
}
CONFIGS = {"8B": (_QWEN3_8B, _QWEN3_8B_DRAFTER), "experts": (_EXPERTS, _EXPERTS_DRAFTER)}
# Of a shape, with which the simulated GPU runs it.
_FEW = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1024,
    "max_position_embeddings": 512,
}
_FEW_LAYERS = {"num_hidden_layers": 6}
_FEW_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def speculative(
    method: str, drafter: Path, tokens: int | None = GAMMA, **keys: Any
) -> dict[str, Any]:
    """`speculative_config`; `tokens` None for method bastion's default."""
    config = {"method": method, "model": str(drafter), "num_speculative_tokens": tokens, **keys}
    return {key: value for key, value in config.items() if value is not None}


def folder_of(shape: str, small: bool) -> Path:
    """The tiny pair widened to a shape, or in a rehearsal the tiny pair itself."""
    return TINY if small else pair_of(shape)


def pair_engine(folder: Path, small: bool, most: int, alive: int, length: int) -> UserEngine:
    """An adaptive engine of a pair on disk, one of `alive` that share the GPU.

    Args:
        most: requests at a time.
        length: the model's.
    """
    drafter = folder / "drafter"
    what = Target(str(folder / "target"), str(drafter))
    settings = {"dtype": "bfloat16", **gpu_share(what, alive, most, length)}
    return UserEngine(
        # The emulation computes every node that is calibrated. Budgets of one engine are compared
        # on the drafter's nodes alone.
        speculative("bastion", drafter, 31 if small else None, bastion_lookup=False),
        target=folder / "target",
        max_num_seqs=most,
        max_model_len=length,
        # As a server has it. Logits of twice as many rows, in float32, would not fit beside others.
        max_num_batched_tokens=2048 if small else 8192,
        **settings | (SMALL if small else {}),
    )


def with_lookup(engine: UserEngine) -> UserEngine:
    """The same engine with copies of the context in its trees, as a user has it."""
    return replace(engine, speculative={**engine.speculative, "bastion_lookup": True})


def dummy_engine(shape: str, small: bool, **more: Any) -> tuple[UserEngine, Any]:
    """An adaptive engine of a shape of `CONFIGS` with random weights; else as vLLM's defaults are.

    The second value is the folder of its configs, which is gone once it is released.

    Args:
        more: further arguments of `LLM`.
    """
    folder = tempfile.TemporaryDirectory(prefix="bastion-")
    target, drafter = CONFIGS[shape]
    if small:
        target = {**target, **_FEW, **_FEW_LAYERS, **(_FEW_EXPERTS if shape == "experts" else {})}
        ids = {"target_layer_ids": [0, 1, 2, 3, 4], "mask_token_id": 1023}
        drafter = {**drafter, **_FEW, "num_target_layers": 6, "dflash_config": ids}
    for name, config in (("target", target), ("drafter", drafter)):
        (Path(folder.name) / name).mkdir()
        (Path(folder.name) / name / "config.json").write_text(json.dumps(config))
    settings = dict(SMALL) if small else {}
    defaults = ("max_num_seqs", "max_model_len", "enable_prefix_caching")
    own = {**dict.fromkeys(defaults), "load_format": "dummy", "skip_tokenizer_init": True, **more}
    settings["more"] = {**settings.get("more", {}), **own}
    config = speculative("bastion", Path(folder.name) / "drafter", None)
    return UserEngine(config, target=Path(folder.name) / "target", **settings), folder


def texts(number: int, tokens: int, temperature: float = 0.0) -> list[Request]:
    """Held-out prompts of all domains in turn, again and again; seeded above T=0."""
    rows = load_prompts(TINY / "prompts.jsonl")
    domains = [[row for row in rows if row["domain"] == domain] for domain in DOMAINS]
    turns = [row for turn in zip(*domains, strict=True) for row in turn]
    return [
        Request(
            str(i), turns[i % len(turns)]["prompt"], tokens, temperature, i if temperature else None
        )
        for i in range(number)
    ]


def noise(number: int, tokens: int, length: int = 128, vocabulary: int = 1000) -> list[Request]:
    """Prompts of `length` token ids, all different, for engines without a tokenizer."""
    return [
        Request(
            str(r),
            [(31 * r + 7 * i) % vocabulary + 2 for i in range(length)],
            tokens,
            params={"detokenize": False},
        )
        for r in range(number)
    ]


def tell_turns(
    job: Job,
    switched: Switched,
    part: str,
    at_once: int,
    modes: Sequence[str],
    rounds: int,
    warm_up: str | None = None,
) -> None:
    """Decode a part in each mode, in their order, then in the reverse one, and so on.

    warm_up: the part of the blocks before, which touch memory and load code; default: the same.
    """
    if not job.small:
        for mode in modes:
            switched.block(mode, warm_up or part, at_once)
    turns = [mode for i in range(1 if job.small else rounds) for mode in modes[:: 1 - 2 * (i % 2)]]
    job.note(part, blocks=[asdict(switched.block(mode, part, at_once)) for mode in turns])
