# SPDX-License-Identifier: Apache-2.0
"""The kinds of drafters that trees are grown from, by the architecture in their checkpoint.

All of them are DFlash's backbone. What differs is what is known of a candidate: its probability at
its position, or, from a head over the best candidates of every position, its score after each
candidate of the position before.

Imports nothing of vLLM: the engine's configuration asks here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "KINDS",
    "MOST_CANDIDATES",
    "Kind",
    "candidates_of",
    "gamma_of",
    "kind_of",
    "restore_block_size",
]

# Of a position, in the tree's op.
MOST_CANDIDATES = 255
# That DSpark's head is asked about, unless `dspark_draft_topk` says, and XPress's.
_MARKOV_CANDIDATES = 32


@dataclass(frozen=True)
class Kind:
    """A kind of drafter."""

    architectures: frozenset[str]
    # Builds its speculator, `module:class`; imported by workers only.
    speculator: str
    # The key of dflash_config that says how many candidates its head looks at.
    candidates_key: str | None = None
    # What vLLM takes it for.
    method: str = "dflash"
    # Whether the settings of its block may lie outside of dflash_config.
    flat: bool = False
    # The field of `versions.Capabilities` that says whether vLLM has it; None = every version.
    needs: str | None = None


_HEADS = "vllm_bastion.drafters.candidate_heads"
KINDS = (
    Kind(
        frozenset({"DFlashDraftModel", "DFlashQwen3ForCausalLM"}),
        "vllm_bastion.drafters.dflash:BastionSpeculator",
    ),
    Kind(frozenset({"DFlash2DraftModel"}), f"{_HEADS}:BastionDFlash2", "selector_top_k"),
    Kind(frozenset({"LiLiCorrDraftModel"}), f"{_HEADS}:BastionLiLiCorr", "lilicorr_candidate_topk"),
    Kind(
        frozenset({"Qwen3DSparkModel"}),
        "vllm_bastion.drafters.dspark:BastionDSpark",
        method="dspark",
        flat=True,
    ),
    Kind(
        frozenset({"Qwen3XPressModel", "DFlashQwen3XPressModel"}),
        "vllm_bastion.drafters.xpress:BastionXPress",
        flat=True,
        needs="has_xpress_drafter",
    ),
)
_XPRESS = KINDS[-1]


def kind_of(architectures: Sequence[str]) -> Kind | None:
    """The kind that all of a checkpoint's architectures are of: vLLM goes by any that it finds."""
    for kind in KINDS:
        if architectures and kind.architectures.issuperset(architectures):
            return kind
    return None


def gamma_of(config: Any) -> int | None:
    """Positions that a drafter's Hugging Face config says it drafts; None if it does not say.

    The block is the anchor's query and one for each drafted token. DSpark's default is to draw the
    first token from the anchor's own. LiLiCorr may name the block beside the settings of its head.
    """
    dflash = getattr(config, "dflash_config", None) or {}
    block = dflash.get("block_size", getattr(config, "block_size", None))
    if block is None:
        block = getattr(config, "xpress_block_size", None)
    if isinstance(block, bool) or not isinstance(block, int):
        return None
    kind = kind_of(list(getattr(config, "architectures", None) or []))
    from_anchor = kind is not None and kind.method == "dspark"
    return block - (not (from_anchor and getattr(config, "sample_from_anchor", True)))


def restore_block_size(config: Any, model: str, revision: str | None) -> None:
    """Give the config of a checkpoint in the speculators library's format its block size.

    vLLM makes a Hugging Face config of that format, and for DFlash leaves the block's size out.

    Args:
        config: as vLLM has read it, changed in place; other formats are left as they are.
        model: folder or Hugging Face name.
    """
    if config.model_type != "speculators" or getattr(config, "block_size", None) is not None:
        return
    from transformers import PretrainedConfig

    written, _ = PretrainedConfig.get_config_dict(model, revision=revision)
    config.block_size = written.get("block_size")


def candidates_of(config: Any) -> int | None:
    """Candidates of each position that a drafter's head scores; None for one without a head."""
    kind = kind_of(list(getattr(config, "architectures", None) or []))
    if kind is _XPRESS:
        ranked = getattr(config, "xpress_topc", None) or config.vocab_size
        return int(min(_MARKOV_CANDIDATES, ranked, config.vocab_size))
    if kind is not None and kind.method == "dspark":
        vocab = getattr(config, "draft_vocab_size", None) or config.vocab_size
        asked = getattr(config, "dspark_draft_topk", None) or _MARKOV_CANDIDATES
        return int(min(asked, vocab, MOST_CANDIDATES))
    if kind is None or kind.candidates_key is None:
        return None
    return int(config.dflash_config[kind.candidates_key])
