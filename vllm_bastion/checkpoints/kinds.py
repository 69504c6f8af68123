# SPDX-License-Identifier: Apache-2.0
"""The kinds of drafters that trees are grown from, by the architecture in their checkpoint.

All of them have DFlash's backbone. They differ in what scores a candidate: its probability at its
position or, with a head over the best candidates of every position, its score after each candidate
of the position before, or after each path to it.

To add a kind, write its speculator in `vllm_bastion/drafters` and add its row to `KINDS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_bastion.checkpoints import rules
from vllm_bastion.checkpoints.rules import Check, Rule

_DOMINO = "DFlashDominoDraftModel"


@dataclass(frozen=True)
class Kind:
    """A kind of drafter."""

    name: str
    """The name that users know."""
    architectures: frozenset[str]
    """Names in a checkpoint's config; all of a checkpoint's names must be among them."""
    speculator: str
    """`module:class` in `vllm_bastion.drafters`; imported by workers only."""
    gamma: Rule
    """Positions that it drafts."""
    candidates: Rule = lambda config: None
    """Candidates of each position that its head scores; None for a kind without a head."""
    checks: tuple[Check, ...] = ()
    """What its checkpoint must have, besides what all kinds need."""
    method: str = "dflash"
    """vLLM's speculative method that loads it."""
    named_as: frozenset[str] = frozenset()
    """Names that libraries write into its checkpoints, but that other kinds share."""
    recognised: Callable[[Any], bool] = lambda config: False
    """Whether a config with such a name is of this kind."""
    models: frozenset[str] = frozenset()
    """Architectures to register with vLLM, which does not have them."""
    model: str | None = None
    """`module:class` of the model that they name."""
    library_format: str | None = None
    """Its format in the speculators library, if vLLM cannot read it; read as DFlash's."""
    library_settings: Callable[[dict[str, Any]], dict[str, Any]] = lambda written: {}
    """Settings that vLLM leaves out of a checkpoint in that library's format."""
    needs: str | None = None
    """The field of `versions.Capabilities` that says whether vLLM has it; None = every version."""


# What a checkpoint of any kind must not have.
COMMON_CHECKS = (
    rules.no_latent_attention,
    rules.without("sample_from_anchor", "samples from the anchor position"),
)
_NO_SELECTOR = rules.without("selector_rank", "selects candidates with a head of its own")

_DRAFTERS = "vllm_bastion.drafters"
KINDS = (
    Kind(
        "DFlash",
        frozenset({"DFlashDraftModel", "DFlashQwen3ForCausalLM"}),
        f"{_DRAFTERS}.dflash:BastionSpeculator",
        gamma=rules.after_anchor,
        checks=(rules.has_settings, _NO_SELECTOR),
    ),
    # The same model in vLLM. Its settings are not in a dflash_config.
    Kind(
        "Muse Glimmer's assistant",
        frozenset({"MuseGlimmerAssistantModel", "DFlashMuseGlimmerAssistantModel"}),
        f"{_DRAFTERS}.dflash:BastionSpeculator",
        gamma=rules.after_anchor,
        checks=(_NO_SELECTOR,),
    ),
    Kind(
        "Domino",
        frozenset({_DOMINO}),
        f"{_DRAFTERS}.domino:BastionDomino",
        gamma=rules.domino_gamma,
        candidates=rules.domino_candidates,
        checks=(rules.has_settings, rules.has_recurrent_head),
        named_as=frozenset({"DFlashDraftModel", "DominoDraftModel"}),
        recognised=rules.is_domino,
        models=frozenset({_DOMINO, "DominoDraftModel"}),
        model=f"{_DRAFTERS}.domino_model:DominoQwen3ForCausalLM",
        library_format="domino",
        library_settings=rules.domino_settings,
    ),
    Kind(
        "DFlash2",
        frozenset({"DFlash2DraftModel"}),
        f"{_DRAFTERS}.candidate_heads:BastionDFlash2",
        gamma=rules.after_anchor,
        candidates=rules.from_dflash_config("selector_top_k"),
        checks=(
            rules.has_settings,
            rules.has_candidates("selector_top_k"),
            rules.whole_vocabulary,
        ),
    ),
    Kind(
        "LiLiCorr",
        frozenset({"LiLiCorrDraftModel"}),
        f"{_DRAFTERS}.candidate_heads:BastionLiLiCorr",
        gamma=rules.after_anchor,
        candidates=rules.from_dflash_config("lilicorr_candidate_topk"),
        checks=(
            rules.has_settings,
            rules.has_candidates("lilicorr_candidate_topk"),
            rules.whole_vocabulary,
        ),
    ),
    Kind(
        "DSpark for Qwen3",
        frozenset({"Qwen3DSparkModel"}),
        f"{_DRAFTERS}.dspark:BastionDSpark",
        gamma=rules.dspark_gamma,
        candidates=rules.dspark_candidates,
        checks=(rules.has_markov_rank, _NO_SELECTOR),
        named_as=frozenset({"DSparkDraftModel"}),
        recognised=rules.is_qwen3,
        method="dspark",
    ),
    Kind(
        "XPress",
        frozenset({"Qwen3XPressModel", "DFlashQwen3XPressModel"}),
        f"{_DRAFTERS}.xpress:BastionXPress",
        gamma=rules.xpress_gamma,
        candidates=rules.xpress_candidates,
        checks=(_NO_SELECTOR,),
        needs="has_xpress_drafter",
    ),
)


def architectures_of(config: Any) -> list[str]:
    """The architectures that vLLM loads a checkpoint as, by its Hugging Face config."""
    names = list(getattr(config, "architectures", None) or ())
    for kind in KINDS:
        known = kind.architectures | kind.named_as
        if names and known.issuperset(names) and kind.recognised(config):
            return [min(kind.architectures)]
    return names


def kind_of(architectures: Sequence[str] | None) -> Kind | None:
    """The one kind that all of a checkpoint's architectures belong to.

    vLLM loads a checkpoint by any of its architectures that it knows, so a mix of kinds is refused.
    """
    for kind in KINDS:
        if architectures and kind.architectures.issuperset(architectures):
            return kind
    return None


def gamma_of(config: Any) -> int | None:
    """Positions that a drafter drafts, by its Hugging Face config; None if it does not say."""
    kind = kind_of(architectures_of(config))
    return None if kind is None else kind.gamma(config)


def candidates_of(config: Any) -> int | None:
    """Candidates of each position that a drafter's head scores; None for one without a head."""
    kind = kind_of(architectures_of(config))
    return None if kind is None else kind.candidates(config)


def restore_settings(config: Any, model: str, revision: str | None) -> None:
    """Read what vLLM leaves out of a checkpoint in the speculators library's format.

    vLLM converts that format to a Hugging Face config, for DFlash without the block size and the
    settings of a head.

    Args:
        config: as vLLM has read it, changed in place; other formats are left as they are.
        model: folder or Hugging Face name.
        revision: of the model on Hugging Face.
    """
    if config.model_type != "speculators" or getattr(config, "block_size", None) is not None:
        return
    from transformers import PretrainedConfig

    written, _ = PretrainedConfig.get_config_dict(model, revision=revision)
    config.block_size = written.get("block_size")
    for kind in KINDS:
        if settings := kind.library_settings(written):
            config.dflash_config |= settings
