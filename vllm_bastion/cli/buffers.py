# SPDX-License-Identifier: Apache-2.0
"""Bytes of a worker's buffers and of its largest logits, compared with vLLM's own DFlash.

Everything follows from a handful of sizes (`Sizes`), so that the tables in the documents, what
`vllm-bastion check` prints and the tests come from one calculation. Weights, the KV cache and the
activations of a forward pass are not counted; they are the same for both methods.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_bastion.drafters.room import MOST_AT_ONCE

_CHUNK = 2**30  # of logits that vLLM's sampler holds in float32
_FLOAT32 = 4


@dataclass(frozen=True)
class Sizes:
    """The sizes that determine an engine's buffers."""

    requests: int
    """`max_num_seqs`"""
    step_rows: int
    """`max_num_batched_tokens`"""
    nodes: int
    """N"""
    depth: int
    """gamma"""
    vocab: int
    hidden: int
    """Width of the target's hidden states that the drafter reads, all layers together."""
    draft_hidden: int
    item: int
    """Bytes per element of the models' dtype."""
    verified_rows: int
    """`engine.limits.max_verified_rows`"""
    bitmask_rows: int
    """`engine.limits.max_bitmask_rows`"""
    trees: int
    """Bytes of `policy.trees.Trees`."""
    attention: int = 0
    """Bytes that tree attention keeps; none on a CPU."""
    recurrent_row: int = 0
    """Bytes that a row keeps for the commit, in all gated delta layers together."""
    draft_groups: int = 1
    """KV cache groups of the drafter."""
    keeps_hidden: bool = True
    """Whether accepted rows move; not in chains of a fixed length."""
    stages: bool = False
    """Whether the drafter's graph combines hidden states, as in vLLM 0.33."""


@dataclass(frozen=True)
class Part:
    """One kind of memory, in bytes: method bastion's, and that of vLLM's DFlash."""

    name: str
    ours: int
    vllms: int = 0


def buffers(sizes: Sizes) -> list[Part]:
    """The buffers that live as long as the engine."""
    s = sizes
    room = max(s.step_rows, s.requests * (1 + s.depth))
    kept = 2 * s.draft_groups * 8 * s.step_rows + 16 * s.step_rows + 12 * s.requests
    words = -(-s.vocab // 32) * 4
    # vLLM sizes its bitmask for each draft of each request.
    chain_words = s.requests * (1 + s.depth) * (words + 4)
    staged = (min(s.requests, MOST_AT_ONCE), min(s.requests, s.step_rows // (1 + s.depth)))
    our_stage, vllms_stage = (n * (1 + s.depth) * s.hidden * s.item * s.stages for n in staged)
    return [
        Part(
            "hidden states of accepted rows",
            (s.step_rows * s.hidden * s.item + kept) * s.keeps_hidden,
        ),
        Part(
            "drafter's input", _drafter(s, room) + our_stage, _drafter(s, s.step_rows) + vllms_stage
        ),
        Part("trees", s.trees + s.requests * s.nodes * 8, s.requests * s.depth * 8),
        Part("tree attention", s.attention),
        Part("grammar bitmask", s.bitmask_rows * (words + 4), chain_words),
        Part("recurrent layers' tree rows", s.verified_rows * s.recurrent_row),
    ]


def _drafter(s: Sizes, rows: int) -> int:
    """The buffers of vLLM's DFlashSpeculator, for `rows` rows."""
    by_row = s.draft_hidden * s.item + 8 + 4 + 8 + 1 + 8 * s.draft_groups
    by_request = 8 + 4 + 8 + 4 + 4 + 4
    by_draft = 8 + 4 + 3 * 8 + 4
    # Slots of the drafter's rows, where they are more than a step's.
    slots = 8 * s.draft_groups * rows if rows > s.step_rows else 0
    return rows * by_row + s.requests * (by_request + s.depth * by_draft) + slots


def logits(sizes: Sizes) -> list[Part]:
    """The largest logits. They come and go, and vLLM's DFlash does not profile the second kind."""
    s, row = sizes, sizes.vocab * sizes.item
    drafted = min(s.requests, s.step_rows // (1 + s.depth))
    chains = min(s.requests, s.step_rows // (2 + s.depth)) * (1 + s.depth)
    return [
        Part("a draft", min(s.requests, MOST_AT_ONCE) * s.depth * row, drafted * s.depth * row),
        Part(
            "a verification",
            s.verified_rows * (row + s.vocab * _FLOAT32),
            chains * row + min(chains * s.vocab * _FLOAT32, _CHUNK),
        ),
    ]


def total(parts: list[Part]) -> Part:
    """All parts together."""
    return Part("all", sum(p.ours for p in parts), sum(p.vllms for p in parts))


def size(count: float) -> str:
    """Bytes in a readable unit."""
    if count >= 2**30:
        return f"{count / 2**30:.2f} GiB"
    return f"{count / 2**20:.0f} MiB" if count >= 2**20 else f"{count / 2**10:.0f} KiB"
