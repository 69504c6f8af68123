# SPDX-License-Identifier: Apache-2.0
"""What the Hugging Face config of a drafter's checkpoint says, by kind of drafter; see `kinds`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

# Most candidates per position that the tree op accepts.
MOST_CANDIDATES = 255
# Candidates that a head scores if its checkpoint does not name a number.
_DEFAULT_CANDIDATES = 32

# A drafter's config -> a number that it implies, or None.
Rule = Callable[[Any], int | None]
# A drafter's config, the name that the user gave and the target's vocabulary size -> why the
# checkpoint is refused, in one sentence, or None.
Check = Callable[[Any, str, int], str | None]


# ---- gamma: the block is the anchor's query and one for each drafted token --------------


def _dflash(config: Any) -> dict[str, Any]:
    return getattr(config, "dflash_config", None) or {}


def _is_whole(value: Any, least: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _block(config: Any) -> int | None:
    """The block size; LiLiCorr writes it beside the settings of its head."""
    block = _dflash(config).get("block_size", getattr(config, "block_size", None))
    return block if _is_whole(block, 0) else None


def after_anchor(config: Any) -> int | None:
    block = _block(config)
    return None if block is None else block - 1


def dspark_gamma(config: Any) -> int | None:
    """By default DSpark draws the first token from the anchor's own query."""
    if getattr(config, "sample_from_anchor", True):
        return _block(config)
    return after_anchor(config)


def layers_read(config: Any) -> list[int]:
    """The target's layers whose hidden states the drafter reads; empty if it does not say."""
    ids = _dflash(config).get("target_layer_ids") or getattr(config, "target_layer_ids", None)
    return list(ids or ())


# ---- candidates -------------------------------------------------------------------------


def dspark_candidates(config: Any) -> int:
    vocab = getattr(config, "draft_vocab_size", None) or config.vocab_size
    asked = getattr(config, "dspark_draft_topk", None) or _DEFAULT_CANDIDATES
    return int(min(asked, vocab, MOST_CANDIDATES))


def from_dflash_config(key: str) -> Rule:
    return lambda config: int(config.dflash_config[key])


# ---- checks -----------------------------------------------------------------------------


def _wrong(name: str, key: str, value: Any, where: str, wanted: str) -> str:
    return (
        f'the config of drafter "{name}" has "{key}": {value!r}{where}, where {wanted}: use a '
        "complete checkpoint"
    )


_IN_DFLASH = " (in dflash_config)"


def has_candidates(key: str) -> Check:
    def check(config: Any, name: str, vocab: int) -> str | None:
        count = _dflash(config).get(key)
        if _is_whole(count, 1) and count <= MOST_CANDIDATES:
            return None
        wanted = f"its head has a whole number of 1 to {MOST_CANDIDATES}"
        return _wrong(name, key, count, _IN_DFLASH, wanted)

    return check


def has_settings(config: Any, name: str, vocab: int) -> str | None:
    if isinstance(getattr(config, "dflash_config", None), dict):
        return None
    return (
        f'"model": "{name}" is not a drafter that trees are grown from, because its config has no '
        '"dflash_config": use a complete checkpoint'
    )


def has_markov_rank(config: Any, name: str, vocab: int) -> str | None:
    rank = getattr(config, "markov_rank", None)
    wanted = "a DSpark checkpoint has a whole number of at least 1"
    return None if _is_whole(rank, 1) else _wrong(name, "markov_rank", rank, "", wanted)


def without(key: str, what: str) -> Check:
    def check(config: Any, name: str, vocab: int) -> str | None:
        if not _dflash(config).get(key):
            return None
        return (
            f'drafter "{name}" {what} (dflash_config.{key}), which a tree cannot use in a '
            f"{config.architectures[0]}: use a plain DFlash checkpoint"
        )

    return check


def whole_vocabulary(config: Any, name: str, vocab: int) -> str | None:
    own = getattr(config, "draft_vocab_size", None)
    if own is None or own >= vocab:
        return None
    return (
        f'drafter "{name}" has draft_vocab_size {own} of the target\'s {vocab} tokens, and the '
        "head over its candidates needs all of them: use a checkpoint for all of them"
    )


def no_latent_attention(config: Any, name: str, vocab: int) -> str | None:
    if _dflash(config).get("attention_mode") != "mla":
        return None
    return (
        f'drafter "{name}" has multi-head latent attention (dflash_config.attention_mode "mla"), '
        "which vLLM's DFlash does not have: use a DFlash checkpoint with attention_mode "
        '"gqa", or without this key'
    )


# ---- formats ----------------------------------------------------------------------------


def is_qwen3(config: Any) -> bool:
    """Whether a DSpark drafter has Qwen3's layers; SpecForge gives all of them one name."""
    return getattr(config, "model_type", None) == "qwen3"
