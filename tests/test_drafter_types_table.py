# SPDX-License-Identifier: Apache-2.0
"""The types of drafters: what is served and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    # vLLM's substitutes for pinned memory and events; they must come before its GPU modules.
    import vllm.v1.worker.cpu.shm  # noqa: F401

from helpers import engine_config, is_refused, write_checkpoint
from vllm_bastion.validate.models import DRAFTER_NAMES

# --- served -----------------------------------------------------------------------------------


@pytest.fixture
def with_drafter(pair: tuple[str, str], tmp_path: Path) -> Any:
    """Writes a drafter's config with other keys; returns the pair of the target and it."""
    return lambda **keys: (pair[0], write_checkpoint(tmp_path / "drafter", "drafter", **keys))


READS: dict[str, Any] = {"mask_token_id": 1, "target_layer_ids": [0, 2]}
HEADS = {"DFlash2DraftModel": "selector_top_k", "LiLiCorrDraftModel": "lilicorr_candidate_topk"}


@pytest.mark.parametrize("architecture", HEADS)
def test_a_head_over_candidates_bounds_top_k_and_may_name_the_block(
    architecture: str, with_drafter: Any
) -> None:
    settings = READS | {"block_size": 6, HEADS[architecture]: 4}
    models = with_drafter(architectures=[architecture], dflash_config=settings)
    for asked, kept in ((2, 2), (4, 4), (9, 4)):
        spec = engine_config(models, bastion_top_k=asked).speculative_config
        assert (spec.bastion_top_k, spec.bastion_gamma) == (kept, 5)
        assert spec.draft_model_config.architectures == [architecture]


@pytest.mark.parametrize("changes, gamma", [({"sample_from_anchor": False}, 7), ({}, 8)])
def test_a_markov_head_is_asked_about_the_best_tokens_of_a_position(
    changes: dict[str, Any], gamma: int, with_drafter: Any
) -> None:
    """Its own default draws from the anchor: as many tokens as the block has queries."""
    models = with_drafter(
        architectures=["Qwen3DSparkModel"], markov_rank=4, dflash_config=None, **READS, **changes
    )
    engine = engine_config(models, bastion_top_k=20)
    spec = engine.speculative_config
    assert (spec.method, spec.bastion_gamma, spec.bastion_top_k) == ("dspark", gamma, 20)
    assert engine.num_lookahead_tokens == gamma + 1
    spec = engine_config(models, dspark_draft_topk=6).speculative_config
    assert spec.bastion_top_k == 6


def test_a_dspark_drafter_of_specforge_is_vllms_qwen3_dspark(with_drafter: Any) -> None:
    """It has DeepSeek's name, Qwen3's model type, and its settings as a DFlash drafter has them."""
    settings = READS | {"projector_type": "dspark", "attention_mode": "gqa"}
    models = with_drafter(
        architectures=["DSparkDraftModel"], markov_rank=4, block_size=7, dflash_config=settings
    )
    spec = engine_config(models).speculative_config
    assert (spec.method, spec.bastion_gamma) == ("dspark", 7)
    assert spec.draft_model_config.architectures == ["Qwen3DSparkModel"]


@pytest.mark.parametrize("name", ["MuseGlimmerAssistantModel", "DFlashMuseGlimmerAssistantModel"])
def test_muse_glimmers_assistant_is_a_dflash_drafter(name: str, with_drafter: Any) -> None:
    model_type = "muse_glimmer_assistant"
    models = with_drafter(architectures=[name], dflash_config=None, model_type=model_type, **READS)
    spec = engine_config(models).speculative_config
    assert (spec.method, spec.bastion_gamma) == ("dflash", 7)
    assert spec.draft_model_config.architectures == ["DFlashMuseGlimmerAssistantModel"]


@pytest.mark.parametrize(
    ("keys", "causal"),
    [({}, False), ({"causal_head": True}, True), ({"causal_head": True, "causal": False}, False)],
)
def test_jetspecs_drafter_is_a_causal_dflash(
    keys: dict[str, bool], causal: bool, with_drafter: Any
) -> None:
    """vLLM reads `causal` only, and would give JetSpec's published drafters DFlash's mask."""
    from vllm.model_executor.models.qwen3_dflash import dflash_has_any_non_causal

    spec = engine_config(with_drafter(dflash_config=READS | keys)).speculative_config
    assert dflash_has_any_non_causal(spec.draft_model_config.hf_config) != causal


def speculators_drafter(folder: Path, layers: str, tokens: int, **settings: Any) -> str:
    """A drafter in the speculators library's format, with another drafter's layers."""
    config = json.loads((Path(layers) / "config.json").read_text())
    written = {
        "mask_token_id": 1,
        "aux_hidden_state_layer_ids": [1, 3],
        "transformer_layer_config": {
            k: v for k, v in config.items() if k not in ("architectures", "block_size")
        },
        "speculators_config": {"proposal_methods": [{"speculative_tokens": tokens}]},
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(written | settings))
    return str(folder)


SPECULATORS: dict[str, dict[str, Any]] = {
    "dflash": {"architectures": ["DFlashSpeculator"]},
    "dflash2": {"selector_top_k": 4, "selector_rank": 2, "draft_vocab_size": None},
    "dspark": {"markov_rank": 4, "sample_from_anchor": False},
}


@pytest.mark.parametrize("method", SPECULATORS)
def test_the_speculators_librarys_format(
    method: str, pair: tuple[str, str], tmp_path: Path
) -> None:
    """Its block size is read, with the anchor in the block; a reduced vocabulary is served."""
    settings = {"speculators_model_type": method, "block_size": 6, "draft_vocab_size": 64}
    settings |= SPECULATORS[method]
    drafter = speculators_drafter(tmp_path / "drafter", pair[1], 5, **settings)
    spec = engine_config((pair[0], drafter)).speculative_config
    assert (spec.bastion_gamma, spec.method) == (5, "dspark" if method == "dspark" else "dflash")
    assert spec.draft_model_config.hf_config.model_type == "speculators"


# --- refused ----------------------------------------------------------------------------------

NO_DRAFTER = 'which method "bastion" grows no trees from'


def _of(*names: str, **changes: Any) -> dict[str, Any]:
    return {"architectures": [*names]} | changes


def _with(**settings: Any) -> dict[str, Any]:
    return {"dflash_config": {"mask_token_id": 1} | settings}


# Case -> keys of the checkpoint that differ from a good one's, parts of the sentence.
DRAFTERS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "another model": (_of("Qwen3ForCausalLM"), (NO_DRAFTER, "Qwen3For")),
    "DFlash2 and plain": (
        _of("DFlashDraftModel", "DFlash2DraftModel"),
        (NO_DRAFTER, "DFlashDraftModel+DFlash2DraftModel"),
    ),
    "EAGLE": (_of("LlamaForCausalLMEagle3"), (NO_DRAFTER, "LlamaForCausalLMEagle3")),
    "DSpark of DeepSeek": (
        _of("DSparkDraftModel", model_type="llama"), (NO_DRAFTER, "DSparkDraftModel"),
    ),
    "latent attention": (_with(attention_mode="mla"), ('attention_mode "mla"', '"gqa"')),
    "DSpark without a head": (
        _of("Qwen3DSparkModel"), ('"markov_rank": None', "complete checkpoint"),
    ),
    "Domino": (_of("DominoDraftModel"), ("is a Domino drafter", DRAFTER_NAMES)),
    "XPress": (_of("Qwen3XPressModel"), ("is an XPress drafter", DRAFTER_NAMES)),
    "no settings": ({"dflash_config": None}, ('"dflash_config": None', "complete checkpoint")),
    "no candidates": (_of("DFlash2DraftModel"), ('"selector_top_k": None', "complete checkpoint")),
    "too many candidates": (
        _of("LiLiCorrDraftModel", **_with(lilicorr_candidate_topk=256)),
        ('"lilicorr_candidate_topk": 256', "1 to 255"),
    ),
    "a selector without its architecture": (
        _with(selector_rank=4), ("selector_rank", "in a DFlashDraftModel", "plain DFlash"),
    ),
    "no block": ({"block_size": None}, ('"block_size": None', "complete checkpoint")),
    "a block of one": ({"block_size": 1}, ('"block_size": 1',)),
    "other vocabulary": ({"vocab_size": 500}, ("vocab_size 500", "vocabulary of 512")),
    "a larger vocabulary": ({"draft_vocab_size": 513}, ("draft_vocab_size 513", "of 512")),
    "a head on a part of the vocabulary": (
        _of("DFlash2DraftModel", draft_vocab_size=64, **_with(selector_top_k=4)),
        ("draft_vocab_size 64", "vocabulary of 512", "for all its tokens"),
    ),
    "deeper target": (_with(target_layer_ids=[0, 4]), ("target layer 4", "4 layers")),
    "anchor": (_with(sample_from_anchor=True), ("sample_from_anchor", "plain DFlash")),
}  # fmt: skip


@pytest.mark.parametrize("case", DRAFTERS)
def test_a_drafter_that_does_not_fit_is_refused(case: str, with_drafter: Any) -> None:
    changes, parts = DRAFTERS[case]
    models = with_drafter(**changes)
    is_refused(models, models[1], *parts)


@pytest.mark.parametrize("projector", [None, "domino"])
def test_a_domino_drafter_in_the_speculators_librarys_layouts_is_refused(
    projector: str | None, pair: tuple[str, str], tmp_path: Path
) -> None:
    """Its own, which vLLM cannot read, and DFlash's."""
    method = "domino" if projector is None else "dflash"
    settings = {"speculators_model_type": method, "projector_type": projector, "block_size": 6}
    drafter = speculators_drafter(tmp_path / "drafter", pair[1], 6, **settings)
    is_refused((pair[0], drafter), drafter, "is a Domino drafter", DRAFTER_NAMES)
