# SPDX-License-Identifier: Apache-2.0
"""What the Hugging Face config of a drafter's checkpoint says, by `drafter_types`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

# Most candidates per position that the tree op accepts.
_MOST_CANDIDATES = 255
# Candidates that a head scores if its checkpoint does not name a number.
_DEFAULT_CANDIDATES = 32

# A drafter's config -> a number that it implies, or None.
Rule = Callable[[Any], int | None]


def _dflash(config: Any) -> dict[str, Any]:
    return getattr(config, "dflash_config", None) or {}


def _is_whole(value: Any, least: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def layers_read(config: Any) -> list[int]:
    """The target's layers whose hidden states the drafter reads; empty if it does not say."""
    ids = _dflash(config).get("target_layer_ids") or getattr(config, "target_layer_ids", None)
    return list(ids or ())


# ---- gamma: the block is the anchor's query and one for each drafted token --------------


def _block(config: Any) -> int | None:
    """The block size; LiLiCorr writes it beside the settings of its head."""
    block = _dflash(config).get("block_size", getattr(config, "block_size", None))
    return block if _is_whole(block, 0) else None


def after_anchor(config: Any) -> int | None:
    block = _block(config)
    return None if block is None else block - 1


def dspark_gamma(config: Any) -> int | None:
    """By default DSpark draws the first token from the anchor's own query."""
    from_anchor = getattr(config, "sample_from_anchor", True)
    return _block(config) if from_anchor else after_anchor(config)


# ---- candidates -------------------------------------------------------------------------


def dspark_candidates(config: Any) -> int:
    vocab = getattr(config, "draft_vocab_size", None) or config.vocab_size
    asked = getattr(config, "dspark_draft_topk", None) or _DEFAULT_CANDIDATES
    return int(min(asked, vocab, _MOST_CANDIDATES))


def from_dflash_config(key: str) -> Rule:
    return lambda config: int(config.dflash_config[key])


# ---- refusals: why a checkpoint is refused, in one sentence, or None ---------------------


def refused_settings(config: Any, name: str, candidates: str | None) -> str | None:
    """Settings of a drafter in `dflash_config` that trees cannot be grown with.

    candidates: the key of the candidates that a head scores; None without a head that ranks them.
    """
    settings = _dflash(config)
    if settings.get("attention_mode") == "mla":
        return (
            f'drafter "{name}" has multi-head latent attention (dflash_config.attention_mode '
            '"mla"), which vLLM\'s DFlash does not have: use a DFlash checkpoint with '
            'attention_mode "gqa", or without this key'
        )
    for key in ("sample_from_anchor", *(() if candidates else ("selector_rank",))):
        if settings.get(key):
            return (
                f'drafter "{name}" has dflash_config.{key}, which trees cannot use in a '
                f"{config.architectures[0]}: use a plain DFlash checkpoint"
            )
    count = settings.get(candidates or "")
    if candidates and not (_is_whole(count, 1) and count <= _MOST_CANDIDATES):
        return (
            f'the config of drafter "{name}" has "{candidates}": {count!r} in dflash_config, where '
            f"its head has a whole number of 1 to {_MOST_CANDIDATES}: use a complete checkpoint"
        )
    return None


def refused_vocabulary(config: Any, name: str, vocab: int, whole: bool) -> str | None:
    """A drafter of another vocabulary than its target's, or of a part where it must be whole."""
    own = getattr(config, "vocab_size", None) or vocab
    part = getattr(config, "draft_vocab_size", None) or vocab
    if own == vocab and part <= vocab and not (whole and part < vocab):
        return None
    key, size = ("vocab_size", own) if own != vocab else ("draft_vocab_size", part)
    what = " for all its tokens" if part < vocab else ""
    return (
        f'drafter "{name}" has {key} {size} and the target a vocabulary of {vocab}: use a drafter '
        f"that was trained for this target{what}"
    )
