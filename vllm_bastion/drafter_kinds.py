# SPDX-License-Identifier: Apache-2.0
"""The kinds of drafters that trees are grown from, by the architecture in their checkpoint.

All of them have DFlash's backbone. They differ in what scores a candidate: its probability at its
position or, with a head over the best candidates of every position, its score after each candidate
of the position before.

To add a kind, write its speculator in `vllm_bastion/drafters` and add its row to `KINDS`. This
module imports nothing of vLLM, because the engine's configuration asks it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "CHAIN_CANDIDATES",
    "DOMINO",
    "KINDS",
    "Kind",
    "architectures_of",
    "candidates_of",
    "gamma_of",
    "kind_of",
    "restore_settings",
]

# Most candidates of a position that the tree's op takes.
_MOST_CANDIDATES = 255
# Candidates that a head is asked about where its checkpoint does not say.
_DEFAULT_CANDIDATES = 32

# Candidates that a head with a state corrects where it follows one chain.
CHAIN_CANDIDATES = _MOST_CANDIDATES
# The architecture of a Domino drafter in vLLM. SpecForge's checkpoints say DFlashDraftModel, and
# later ones DominoDraftModel.
DOMINO = "DFlashDominoDraftModel"

# A drafter's Hugging Face config -> a number that it implies, or None.
Rule = Callable[[Any], int | None]
# A drafter's config, the name that the user gave and the target's vocabulary size -> why the
# checkpoint is refused, in one sentence, or None.
Check = Callable[[Any, str, int], str | None]


@dataclass(frozen=True)
class Kind:
    """A kind of drafter."""

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
    models: frozenset[str] = frozenset()
    """Architectures to register with vLLM, which does not have them."""
    model: str | None = None
    """`module:class` of the model that they name."""
    needs: str | None = None
    """The field of `versions.Capabilities` that says whether vLLM has it; None = every version."""


# ---- gamma: the block is the anchor's query and one for each drafted token --------------


def _dflash(config: Any) -> dict[str, Any]:
    return getattr(config, "dflash_config", None) or {}


def _block(config: Any) -> int | None:
    """The block size; LiLiCorr writes it beside the settings of its head."""
    block = _dflash(config).get("block_size", getattr(config, "block_size", None))
    return block if isinstance(block, int) and not isinstance(block, bool) else None


def _after_anchor(config: Any) -> int | None:
    block = _block(config)
    return None if block is None else block - 1


def _dspark_gamma(config: Any) -> int | None:
    """By default DSpark draws the first token from the anchor's own query."""
    if getattr(config, "sample_from_anchor", True):
        return _block(config)
    return _after_anchor(config)


def _xpress_gamma(config: Any) -> int | None:
    if _block(config) is None:
        block = getattr(config, "xpress_block_size", None)
        return block - 1 if isinstance(block, int) and not isinstance(block, bool) else None
    return _after_anchor(config)


def _domino_gamma(config: Any) -> int | None:
    """With `shift_label` each query predicts the token after its own, the anchor's as well."""
    return _block(config) if _dflash(config).get("shift_label") else _after_anchor(config)


# ---- candidates -------------------------------------------------------------------------


def _dspark_candidates(config: Any) -> int:
    vocab = getattr(config, "draft_vocab_size", None) or config.vocab_size
    asked = getattr(config, "dspark_draft_topk", None) or _DEFAULT_CANDIDATES
    return int(min(asked, vocab, _MOST_CANDIDATES))


def _xpress_candidates(config: Any) -> int:
    ranked = getattr(config, "xpress_topc", None) or config.vocab_size
    return int(min(_DEFAULT_CANDIDATES, ranked, config.vocab_size))


def _domino_candidates(config: Any) -> int:
    vocab = getattr(config, "draft_vocab_size", None) or config.vocab_size
    return int(min(_DEFAULT_CANDIDATES, vocab))


def _from_dflash_config(key: str) -> Rule:
    return lambda config: int(config.dflash_config[key])


# ---- checks -----------------------------------------------------------------------------


def _has_candidates(key: str) -> Check:
    def check(config: Any, name: str, vocab: int) -> str | None:
        count = _dflash(config).get(key)
        if not isinstance(count, bool) and count in range(1, _MOST_CANDIDATES + 1):
            return None
        return (
            f'the config of drafter "{name}" has "{key}": {count!r} (in dflash_config), where its '
            f"head has a whole number of 1 to {_MOST_CANDIDATES}: use a complete checkpoint"
        )

    return check


def _has_settings(config: Any, name: str, vocab: int) -> str | None:
    if isinstance(getattr(config, "dflash_config", None), dict):
        return None
    return (
        f'"model": "{name}" is no drafter that trees are grown from, because its config has no '
        '"dflash_config": use a complete checkpoint'
    )


def _has_markov_rank(config: Any, name: str, vocab: int) -> str | None:
    rank = getattr(config, "markov_rank", None)
    if isinstance(rank, int) and not isinstance(rank, bool) and rank >= 1:
        return None
    return (
        f'the config of drafter "{name}" has "markov_rank": {rank!r}, where a DSpark checkpoint '
        "has a whole number of at least 1: use a complete checkpoint"
    )


def _has_recurrent_head(config: Any, name: str, vocab: int) -> str | None:
    settings = _dflash(config)
    least = {"emb_dim": 1, "gru_hidden_dim": 1, "pure_draft_prefix_len": 0}
    for key, low in least.items():
        value = settings.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            return (
                f'the config of drafter "{name}" has "{key}": {value!r} (in dflash_config), where '
                f"a Domino checkpoint has a whole number of at least {low}: use a complete "
                "checkpoint"
            )
    if not isinstance(settings.get("shift_label"), bool):
        return (
            f'the config of drafter "{name}" has "shift_label": {settings.get("shift_label")!r} '
            "(in dflash_config), where a Domino checkpoint has true or false: use a complete "
            "checkpoint"
        )
    return None


def _without(key: str, what: str) -> Check:
    def check(config: Any, name: str, vocab: int) -> str | None:
        if not _dflash(config).get(key):
            return None
        return (
            f'drafter "{name}" {what} (dflash_config.{key}), which a tree cannot use in a '
            f"{config.architectures[0]}: use a plain DFlash checkpoint"
        )

    return check


def _whole_vocabulary(config: Any, name: str, vocab: int) -> str | None:
    own = getattr(config, "draft_vocab_size", None)
    if own is None or own >= vocab:
        return None
    return (
        f'drafter "{name}" has draft_vocab_size {own} of the target\'s {vocab} tokens, and the '
        "head over its candidates needs all of them: use a checkpoint for all of them"
    )


def _no_latent_attention(config: Any, name: str, vocab: int) -> str | None:
    if _dflash(config).get("attention_mode") != "mla":
        return None
    return (
        f'drafter "{name}" has multi-head latent attention (dflash_config.attention_mode "mla"), '
        "which vLLM's DFlash does not have: use a DFlash checkpoint with attention_mode "
        '"gqa", or without this key'
    )


_NO_ANCHOR = _without("sample_from_anchor", "samples from the anchor position")
_NO_SELECTOR = _without("selector_rank", "selects candidates with a head of its own")

_DRAFTERS = "vllm_bastion.drafters"
KINDS = (
    Kind(
        frozenset({"DFlashDraftModel", "DFlashQwen3ForCausalLM"}),
        f"{_DRAFTERS}.dflash:BastionSpeculator",
        gamma=_after_anchor,
        checks=(_has_settings, _no_latent_attention, _NO_ANCHOR, _NO_SELECTOR),
    ),
    # The same model in vLLM. Its settings are not in a dflash_config.
    Kind(
        frozenset({"MuseGlimmerAssistantModel", "DFlashMuseGlimmerAssistantModel"}),
        f"{_DRAFTERS}.dflash:BastionSpeculator",
        gamma=_after_anchor,
        checks=(_no_latent_attention, _NO_ANCHOR, _NO_SELECTOR),
    ),
    Kind(
        frozenset({DOMINO}),
        f"{_DRAFTERS}.domino:BastionDomino",
        gamma=_domino_gamma,
        candidates=_domino_candidates,
        checks=(_has_settings, _has_recurrent_head, _no_latent_attention, _NO_ANCHOR),
        models=frozenset({DOMINO, "DominoDraftModel"}),
        model=f"{_DRAFTERS}.domino_model:DominoQwen3ForCausalLM",
    ),
    Kind(
        frozenset({"DFlash2DraftModel"}),
        f"{_DRAFTERS}.candidate_heads:BastionDFlash2",
        gamma=_after_anchor,
        candidates=_from_dflash_config("selector_top_k"),
        checks=(
            _has_settings,
            _has_candidates("selector_top_k"),
            _no_latent_attention,
            _NO_ANCHOR,
            _whole_vocabulary,
        ),
    ),
    Kind(
        frozenset({"LiLiCorrDraftModel"}),
        f"{_DRAFTERS}.candidate_heads:BastionLiLiCorr",
        gamma=_after_anchor,
        candidates=_from_dflash_config("lilicorr_candidate_topk"),
        checks=(
            _has_settings,
            _has_candidates("lilicorr_candidate_topk"),
            _no_latent_attention,
            _NO_ANCHOR,
            _whole_vocabulary,
        ),
    ),
    Kind(
        frozenset({"Qwen3DSparkModel"}),
        f"{_DRAFTERS}.dspark:BastionDSpark",
        gamma=_dspark_gamma,
        candidates=_dspark_candidates,
        checks=(_has_markov_rank, _no_latent_attention, _NO_ANCHOR, _NO_SELECTOR),
        method="dspark",
    ),
    Kind(
        frozenset({"Qwen3XPressModel", "DFlashQwen3XPressModel"}),
        f"{_DRAFTERS}.xpress:BastionXPress",
        gamma=_xpress_gamma,
        candidates=_xpress_candidates,
        checks=(_no_latent_attention, _NO_ANCHOR, _NO_SELECTOR),
        needs="has_xpress_drafter",
    ),
)


def architectures_of(config: Any) -> list[str]:
    """The architectures that vLLM loads a checkpoint as, by its Hugging Face config.

    SpecForge names every DSpark drafter as DeepSeek's is named in vLLM. vLLM tells them apart by
    the model type. A Domino drafter is a DFlash one by name, and differs in a setting.
    """
    names = list(getattr(config, "architectures", None) or ())
    known = {"DFlashDraftModel", "DominoDraftModel", "DFlashDominoDraftModel"}
    if names and known.issuperset(names) and _is_domino(config):
        return [DOMINO]
    if getattr(config, "model_type", None) == "qwen3":
        names = ["Qwen3DSparkModel" if name == "DSparkDraftModel" else name for name in names]
    return names


def _is_domino(config: Any) -> bool:
    return _dflash(config).get("projector_type") == "domino"


def kind_of(architectures: Sequence[str] | None) -> Kind | None:
    """The one kind that all of a checkpoint's architectures belong to.

    vLLM loads a checkpoint by any of its architectures that it knows, so a mix is no kind.
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
    settings of a Domino head. The library has two layouts of the latter.

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
    own_format = written.get("speculators_model_type") == "domino"
    if own_format or written.get("projector_type") == "domino":
        of_rank = "logits_correction_emb_dim" if own_format else "emb_dim"
        of_anchor = "sample_from_anchor" if own_format else "shift_label"
        # The library's own defaults.
        config.dflash_config |= {
            "projector_type": "domino",
            "emb_dim": written.get(of_rank, 256),
            "gru_hidden_dim": written.get("gru_hidden_dim", 1024),
            "pure_draft_prefix_len": written.get("pure_draft_prefix_len", 1),
            "shift_label": written.get(of_anchor, True),
            "sample_from_anchor": False,
        }
