# SPDX-License-Identifier: Apache-2.0
"""The kinds of drafters that trees are grown from, by the architecture in their checkpoint.

All of them have DFlash's backbone. They differ in what scores a candidate: its probability at its
position or, with a head over the best candidates of every position, its score after each candidate
of the position before.

To add a kind, write its speculator in `vllm_bastion/drafters` and add its row to `KINDS`. Drafters
of other families are refused by name, each with the reason and the nearest that works.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_bastion.checkpoints import rules
from vllm_bastion.checkpoints.rules import Check, Rule


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
    """Read the block size of a checkpoint in the speculators library's format.

    vLLM converts that format to a Hugging Face config, for DFlash without the block size.

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


# Types that are refused by name, by a word in the config: an architecture may be DFlash's.
_REFUSED = {"domino": "a Domino", "xpress": "an XPress"}


def refused_type(config: Any) -> str | None:
    """The name of a drafter's type, with its article, if it is refused by name, else None.

    Args:
        config: Hugging Face's, or the content of a config.json in any library's format.
    """

    def value(part: Any, key: str) -> Any:
        return part.get(key) if isinstance(part, dict) else getattr(part, key, None)

    names = [*(value(config, "architectures") or ())]
    for part in (config, value(config, "dflash_config")):
        names += [value(part, "speculators_model_type"), value(part, "projector_type")]
    text = " ".join(map(str, names)).lower()
    return next((name for word, name in _REFUSED.items() if word in text), None)


# Pattern in the lower-case name of a checkpoint's architecture or format -> why it is refused, and
# the nearest kind that works.
_PLAIN_DFLASH = "use a DFlash drafter (DFlashDraftModel) of this target"
_OTHERS: dict[str, str] = {
    "jetspec": "is a JetSpec drafter, which vLLM does not have: if it was exported in DFlash's "
    "format, name its architecture DFlashDraftModel and set dflash_config.causal to true",
    r"(\b|\d)mfd": f"is an MFD drafter, which vLLM does not have: {_PLAIN_DFLASH}",
    "ubtree": f"is a UBTree drafter, which vLLM does not have: {_PLAIN_DFLASH}, whose trees "
    "bastion grows itself",
    "dspine": "is a DSpine drafter, which vLLM does not have: use a DSpark or DFlash drafter "
    "(Qwen3DSparkModel, DFlashDraftModel) of this target",
    "peagle": "is a P-EAGLE drafter, which vLLM's Model Runner V2 does not run: "
    f'{_PLAIN_DFLASH}, or vLLM\'s method "eagle3"',
    "gemma4dspark": f"is a DSpark drafter of Gemma 4, whose head caps its scores: {_PLAIN_DFLASH}",
    "qwen3omnidspark": "is a DSpark drafter of Qwen3-Omni, for which vLLM requires "
    "num_speculative_tokens to be the block size, and here it is the size of a tree: use vLLM's "
    'method "dspark"',
    "dflashlaguna": "is a DFlash drafter of Laguna, whose layers differ from the ones that trees "
    'were tested with: use vLLM\'s method "dflash"',
    "dsparkdraft": "is a DSpark drafter of DeepSeek, which has latent attention and is part of the "
    "target's checkpoint: use a target with a Qwen3DSparkModel",
    "dsparkv41": "is a DSpark drafter of DeepSeek, which has latent attention and is part of the "
    "target's checkpoint: use a target with a Qwen3DSparkModel",
    "musespark": "is a DSpark drafter of Muse Spark, whose layers differ from the ones that trees "
    'were tested with: use vLLM\'s method "dspark"',
    "dflash2beam": "is Beam's DFlash2 drafter, whose layers differ from the ones that trees were "
    'tested with: use vLLM\'s method "dflash"',
    "k3dspark": "is a DSpark drafter with latent attention: use a target with a Qwen3DSparkModel",
    "eagle": "is an EAGLE drafter, which drafts token by token: "
    f'{_PLAIN_DFLASH}, or vLLM\'s method "eagle3"',
    "medusa": f"is a Medusa drafter, whose heads are independent: {_PLAIN_DFLASH}, or vLLM's "
    'method "medusa"',
    "mtp": "is a target's own multi-token prediction (MTP), which drafts token by token: "
    f'{_PLAIN_DFLASH}, or vLLM\'s method "mtp"',
    "mlpspeculator": "is an MLP speculator, which drafts token by token: "
    f'{_PLAIN_DFLASH}, or vLLM\'s method "mlp_speculator"',
}


def other_family(config: Any) -> str | None:
    """Why a drafter of another family is refused, and the nearest that works; None if unknown.

    Args:
        config: the checkpoint's Hugging Face config, or the speculators library's as a dictionary.
    """
    if not isinstance(config, dict):
        config = {
            "architectures": getattr(config, "architectures", None),
            "model_type": getattr(config, "model_type", None),
            "parallel_drafting": getattr(config, "parallel_drafting", None),
        }
    names = [*(config.get("architectures") or ())]
    names += [config.get(key) or "" for key in ("model_type", "speculators_model_type")]
    if config.get("parallel_drafting"):  # in the config of an EAGLE-3 drafter
        names.append("peagle")
    text = " ".join(names).lower().replace("-", "").replace("_", "")
    return next((why for pattern, why in _OTHERS.items() if re.search(pattern, text)), None)
