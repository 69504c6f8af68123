# SPDX-License-Identifier: Apache-2.0
"""The tiny drafter as other kinds in vLLM's published formats: its backbone with random heads.

The convolutions are near the identity, and the heads are large enough to reorder tokens often but
small enough that drafts are still accepted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.e2e.engines import DRAFTER, TARGET

_HIDDEN, _LAYERS, _VOCAB, _BLOCK = 192, 3, 1024, 16
CANDIDATES = 8  # scored by a head
_TAPS, _GROUP, _RANK = 3, 32, 16
_WIDTH, _FACTOR, _HEADS = 32, 16, 2  # of LiLiCorr's attention over the lattice

# A drafter's further weights; what makes them adds its settings to the config.
Made = dict[str, Tensor]

CAUSAL: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "dflash_config.causal": {"dflash_config": {"causal": True}},
}


def _dflash2(config: dict[str, Any], noise: Any) -> Made:
    config["architectures"] = ["DFlash2DraftModel"]
    config["dflash_config"] |= {
        "conv_kernel_size": _TAPS,
        "conv_group_size": _GROUP,
        "selector_rank": _RANK,
        "selector_top_k": CANDIDATES,
    }
    weights: Made = {}
    for layer in range(_LAYERS):
        for part in ("attention_conv", "mlp_conv"):
            name = f"layers.{layer}.{part}"
            base = noise(2, _TAPS, _HIDDEN, std=0.02)
            base[:, 0] += 1.0
            weights[f"{name}.base_kernel"] = base
            shape = 2 * _TAPS * _HIDDEN // _GROUP, _HIDDEN
            weights[f"{name}.kernel_projection.weight"] = noise(*shape, std=0.002)
    return weights | {
        "candidate_selector.predecessor_codebook": noise(_VOCAB, _RANK, std=1.0),
        "candidate_selector.successor_codebook": noise(_VOCAB, _RANK, std=1.0),
        "candidate_selector.hidden_projection.weight": noise(_RANK, _HIDDEN, std=0.03),
    }


def _lilicorr(config: dict[str, Any], noise: Any) -> Made:
    config["architectures"] = ["LiLiCorrDraftModel"]
    config["dflash_config"] |= {
        "lilicorr_hidden_size": _WIDTH, "lilicorr_candidate_topk": CANDIDATES,
        "lilicorr_num_heads": _HEADS, "lilicorr_num_layers": 1, "lilicorr_mlp_ratio": 2.0,
        "lilicorr_factor_dim": _FACTOR, "lilicorr_vector_eps": 1e-6, "lilicorr_logit_scale": 3.0,
    }  # fmt: skip
    weights: Made = {}
    for name, outputs, inputs in (
        ("token_proj", _WIDTH, _HIDDEN),
        ("pass_hidden_proj", _WIDTH, _HIDDEN),
        ("context_proj", _WIDTH, _HIDDEN),
        ("feature_mlp.up_proj", _WIDTH, 5),
        ("feature_mlp.down_proj", _WIDTH, _WIDTH),
        ("layers.0.attn.out_proj", _WIDTH, _WIDTH),
        ("layers.0.mlp.up_proj", 2 * _WIDTH, _WIDTH),
        ("layers.0.mlp.down_proj", _WIDTH, 2 * _WIDTH),
        ("factor_input_proj", _WIDTH, 3 * _WIDTH),
        ("out_head", _FACTOR, _WIDTH),
        ("in_head", _FACTOR, _WIDTH),
        ("anchor_out_head", _FACTOR, _WIDTH),
    ):
        weights[f"lilicorr.{name}.weight"] = noise(outputs, inputs, std=inputs**-0.5)
        weights[f"lilicorr.{name}.bias"] = noise(outputs, std=0.1)
    for name, shape in {
        "layers.0.attn.in_proj_weight": (3 * _WIDTH, _WIDTH),
        "layers.0.attn.in_proj_bias": (3 * _WIDTH,),
        "slot_embedding": (1, 1, _BLOCK - 1, 1, _WIDTH),
        "rank_embedding": (1, 1, 1, CANDIDATES, _WIDTH),
        "relative_slot_bias": (_HEADS, 2 * _BLOCK - 1),
        "same_slot_bias": (_HEADS,),
        "feature_norm.bias": (5,),
    }.items():
        weights[f"lilicorr.{name}"] = noise(*shape, std=0.2)
    weights["lilicorr.feature_norm.weight"] = torch.ones(5)
    for name in ("layers.0.attn_norm", "layers.0.mlp_norm", "output_norm", "anchor_norm"):
        weights[f"lilicorr.{name}.weight"] = torch.ones(_WIDTH)
    return weights


HEADS = {"dflash2": _dflash2, "lilicorr": _lilicorr}
MARKOV = ("dspark", "dspark-anchor", "specforge-dspark")
MUSE = "muse-glimmer"  # the same drafter with other names
# In the speculators library's format, with three quarters of the vocabulary.
REDUCED = ("speculators-dflash", "speculators-dspark")


def _make_dspark(from_anchor: bool, config: dict[str, Any], noise: Any) -> Made:
    config |= config.pop("dflash_config") | {
        "architectures": ["Qwen3DSparkModel"], "sample_from_anchor": from_anchor,
        "block_size": _BLOCK - from_anchor, "markov_rank": _RANK, "dspark_draft_topk": CANDIDATES,
    }  # fmt: skip
    return _markov_head(_VOCAB, noise)


def _markov_head(size: int, noise: Any) -> Made:
    return {
        "markov_head.markov_w1.weight": noise(_VOCAB, _RANK, std=1.0),
        "markov_head.markov_w2.weight": noise(size, _RANK, std=0.3),
    }


def _make_specforge(config: dict[str, Any], noise: Any) -> Made:
    """A Markov head, whose settings have SpecForge's names."""
    settings = config["dflash_config"] | {"projector_type": "dspark", "attention_mode": "gqa"}
    weights = _make_dspark(True, config, noise)
    config |= {"architectures": ["DSparkDraftModel"], "dflash_config": settings}
    for key in ("sample_from_anchor", "mask_token_id", "target_layer_ids"):
        del config[key]
    return weights


def _make_reduced(method: str, config: dict[str, Any], noise: Any) -> Made:
    """A reduced vocabulary; the config becomes the speculators library's."""
    settings = config.pop("dflash_config")
    token_ids = torch.arange(_VOCAB)
    token_ids = token_ids[token_ids % 4 != 3]
    layers = dict(config)
    config.clear()
    config |= {
        "architectures": [f"{method}-speculator"],
        "speculators_model_type": method,
        "block_size": layers.pop("block_size"),
        "draft_vocab_size": len(token_ids),
        "mask_token_id": settings["mask_token_id"],
        # Numbered from the embedding, which vLLM's own format does not count.
        "aux_hidden_state_layer_ids": [i + 1 for i in settings["target_layer_ids"]],
        "sliding_window_non_causal": True,
        "transformer_layer_config": layers,
        "speculators_config": {
            "algorithm": method,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": _BLOCK - 1}],
            "verifier": {"name_or_path": TARGET, "architectures": ["Qwen3ForCausalLM"]},
        },
    }
    head = load_file(Path(TARGET) / "model.safetensors")["model.embed_tokens.weight"]
    weights = {
        "d2t": token_ids - torch.arange(len(token_ids)),
        "t2d": torch.isin(torch.arange(_VOCAB), token_ids),
        "lm_head.weight": head[token_ids].contiguous(),
    }
    if method == "dspark":
        config["markov_rank"] = _RANK
        weights |= _markov_head(len(token_ids), noise)
    return weights


def make_drafter(kind: str, folder: Path) -> str:
    """Write a checkpoint of a kind that the constants above name to a folder."""
    config = json.loads((Path(DRAFTER) / "config.json").read_text())
    weights = load_file(Path(DRAFTER) / "model.safetensors")
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int, std: float) -> Tensor:
        return std * torch.randn(*shape, generator=generator)

    if kind in CAUSAL:
        changes = dict(CAUSAL[kind])
        config["dflash_config"] |= changes.pop("dflash_config", {})
        config |= changes
    elif kind == MUSE:
        config |= config.pop("dflash_config")
        config["architectures"] = ["MuseGlimmerAssistantModel"]
        config["model_type"] = "muse_glimmer_assistant"
        weights["encoder.fc.weight"] = weights.pop("fc.weight")
        weights["encoder.output_norm_enc.weight"] = weights.pop("hidden_norm.weight")
    elif kind == "specforge-dspark":
        weights |= _make_specforge(config, noise)
    elif kind in MARKOV:
        weights |= _make_dspark(kind == "dspark-anchor", config, noise)
    elif kind in REDUCED:
        weights |= _make_reduced(kind.removeprefix("speculators-"), config, noise)
    else:
        weights |= HEADS[kind](config, noise)
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def drafted(session: Any) -> list[list[int]]:
    """A probe: the runner's drafts of each request, [D] of a chain, if one of them can use drafts.

    The drafter's own buffer is not reliable: if no request can use a draft, vLLM 0.33 writes -1
    over this buffer or over a copy of it.
    """
    running, states = session.scheduler.running, session.runner.req_states
    if all(one.max_tokens - one.num_output_tokens <= 1 for one in running):
        return []
    slots = [slot for _, slot in sorted(states.req_id_to_index.items())]
    steps = session.runner.speculator.num_speculative_steps
    return [row[:steps] for row in states.draft_tokens[slots].tolist()]
