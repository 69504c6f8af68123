# SPDX-License-Identifier: Apache-2.0
"""The types of drafters that trees are grown from, by the architecture in their checkpoint.

All of them have DFlash's backbone. They differ in what scores a candidate: its probability at its
position or, with a head over the best candidates of every position, its score after each candidate
of the position before.

To add a type, write its speculator in `vllm_bastion/drafters` and add its row to `DRAFTER_TYPES`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm_bastion.checkpoints import rules
from vllm_bastion.checkpoints.rules import Rule


@dataclass(frozen=True)
class DrafterType:
    """A type of drafter."""

    name: str
    """The name that users know."""
    architectures: frozenset[str]
    """Names in a checkpoint's config; all of a checkpoint's names must be among them."""
    speculator: str
    """`package.module:class`; imported by workers only."""
    gamma: Rule
    """Positions that it drafts."""
    candidates: Rule = lambda config: None
    """Candidates of each position that its head scores; None for a type without a head."""
    candidates_key: str | None = None
    """Their key in `dflash_config`; such a head needs the target's whole vocabulary."""
    needs: str = "dflash_config"
    """A key that its config must have."""
    method: str = "dflash"
    """vLLM's speculative method that loads it."""


_DRAFTERS = "vllm_bastion.drafters"
DRAFTER_TYPES = (
    DrafterType(
        "DFlash",
        frozenset({"DFlashDraftModel", "DFlashQwen3ForCausalLM"}),
        f"{_DRAFTERS}.dflash:BastionSpeculator",
        gamma=rules.after_anchor,
    ),
    # The same model in vLLM, with its settings in no dflash_config.
    DrafterType(
        "Muse Glimmer's assistant",
        frozenset({"MuseGlimmerAssistantModel", "DFlashMuseGlimmerAssistantModel"}),
        f"{_DRAFTERS}.dflash:BastionSpeculator",
        gamma=rules.after_anchor,
        needs="block_size",
    ),
    DrafterType(
        "DFlash2",
        frozenset({"DFlash2DraftModel"}),
        f"{_DRAFTERS}.candidate_heads:BastionDFlash2",
        gamma=rules.after_anchor,
        candidates=rules.from_dflash_config("selector_top_k"),
        candidates_key="selector_top_k",
    ),
    DrafterType(
        "LiLiCorr",
        frozenset({"LiLiCorrDraftModel"}),
        f"{_DRAFTERS}.candidate_heads:BastionLiLiCorr",
        gamma=rules.after_anchor,
        candidates=rules.from_dflash_config("lilicorr_candidate_topk"),
        candidates_key="lilicorr_candidate_topk",
    ),
    DrafterType(
        "DSpark for Qwen3",
        frozenset({"Qwen3DSparkModel"}),
        f"{_DRAFTERS}.dspark:BastionDSpark",
        gamma=rules.dspark_gamma,
        candidates=rules.dspark_candidates,
        needs="markov_rank",
        method="dspark",
    ),
)


def architectures_of(config: Any) -> list[str]:
    """The architectures that vLLM loads a checkpoint as, by its Hugging Face config."""
    names = list(getattr(config, "architectures", None) or ())
    # SpecForge gives the DSpark drafters of all targets one name.
    if names == ["DSparkDraftModel"] and getattr(config, "model_type", None) == "qwen3":
        return ["Qwen3DSparkModel"]
    return names


def drafter_type_of(architectures: Sequence[str] | None) -> DrafterType | None:
    """The one type that all of a checkpoint's architectures belong to.

    vLLM loads a checkpoint by any of its architectures that it knows, so a mix of types is refused.
    """
    for drafter_type in DRAFTER_TYPES:
        if architectures and drafter_type.architectures.issuperset(architectures):
            return drafter_type
    return None


def gamma_of(config: Any) -> int | None:
    """Positions that a drafter drafts, by its Hugging Face config; None if it does not say."""
    drafter_type = drafter_type_of(architectures_of(config))
    return None if drafter_type is None else drafter_type.gamma(config)


def candidates_of(config: Any) -> int | None:
    """Candidates of each position that a drafter's head scores; None for one without a head."""
    drafter_type = drafter_type_of(architectures_of(config))
    return None if drafter_type is None else drafter_type.candidates(config)


def restore_settings(config: Any, model: str, revision: str | None) -> None:
    """Give a drafter's config the settings that vLLM does not read from its checkpoint.

    JetSpec names its causal mask `causal_head`. The speculators library's format, which vLLM
    converts, loses DFlash's block size.

    Args:
        config: as vLLM has read it, changed in place.
        model: folder or Hugging Face name.
        revision: of the model on Hugging Face.
    """
    settings = getattr(config, "dflash_config", None) or {}
    if "causal_head" in settings:
        settings.setdefault("causal", settings["causal_head"])
    if config.model_type != "speculators" or getattr(config, "block_size", None) is not None:
        return
    from transformers import PretrainedConfig

    written, _ = PretrainedConfig.get_config_dict(model, revision=revision)
    config.block_size = written.get("block_size")


# Types that are refused by name, by a word in the config: an architecture may be DFlash's.
_REFUSED = {"domino": "a Domino", "xpress": "an XPress"}


def refused_type(written: dict[str, Any]) -> str | None:
    """The name of a drafter's type, with its article, if it is refused by name, else None.

    written: the content of its config.json, in any library's format.
    """
    names = [*(written.get("architectures") or ())]
    for part in (written, written.get("dflash_config") or {}):
        names += [part.get("speculators_model_type"), part.get("projector_type")]
    text = " ".join(map(str, names)).lower()
    return next((name for word, name in _REFUSED.items() if word in text), None)
