# SPDX-License-Identifier: Apache-2.0
"""Check that a wide pair computes the tiny one's function, with the models of `benchmarks/tiny`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.tiny.heads import Domino
from benchmarks.widen.checkpoint import open_pair, read_config
from benchmarks.widen.widening import Drafter, Target

# Rounding to bf16 may only decide near-ties.
_MAX_DISTANCE, _MIN_EQUAL, _MIN_GAP = 0.02, 0.97, 50.0
_PROMPTS, _POSITIONS = 6, 20


@dataclass(frozen=True)
class Distance:
    """Logits of the wide model against the tiny one's, over positions of held-out text."""

    positions: int
    equal_argmax: int
    largest_difference: float
    largest_logit: float
    # From the smallest of the best logits down to the largest padded one; None without padding.
    gap: float | None

    @property
    def problem(self) -> str | None:
        """Why this is not the same function, or None if it is."""
        if self.largest_difference > _MAX_DISTANCE * self.largest_logit:
            return f"logits differ by {self.largest_difference:.3g} of {self.largest_logit:.3g}"
        if self.equal_argmax < _MIN_EQUAL * self.positions:
            return f"{self.positions - self.equal_argmax} of {self.positions} argmaxes differ"
        if self.gap is not None and self.gap < _MIN_GAP:
            return f"padded vocabulary entries are only {self.gap:.3g} below the best"
        return None


def distance(truth: Tensor, hidden: Tensor, head: Tensor, bias: Tensor | None = None) -> Distance:
    """truth [..., v] logits; hidden [..., H] and head [V, H] of the wide model, V >= v.

    bias: [..., V], added to its logits.
    """
    vocab = truth.shape[-1]
    logits = F.linear(hidden, head[:vocab].float())
    if bias is not None:
        logits += bias[..., :vocab]
    gap = None
    if len(head) > vocab:
        # All padded rows are equal.
        padded = F.linear(hidden, head[vocab : vocab + 1].float())
        if bias is not None:
            padded += bias[..., vocab:].amax(-1, keepdim=True)
        gap = float((logits.max(-1).values - padded[..., 0]).min())
    return Distance(
        positions=truth[..., 0].numel(),
        equal_argmax=int((truth.argmax(-1) == logits.argmax(-1)).sum()),
        largest_difference=float((truth - logits).abs().max()),
        largest_logit=float(truth.abs().max()),
        gap=gap,
    )


@torch.inference_mode()
def check(
    tiny: tuple[Target, Drafter],
    folder: Path,
    ids: Tensor,
    tiny_features: tuple[int, ...],
    kind: str = "drafter",
) -> dict[str, Distance]:
    """Compare a written pair with the tiny one it was made from.

    The target is compared at every position, the drafter on the blocks that start at the last and
    at the middle position. A head that corrects its logits sees the best uncorrected tokens.

    Args:
        ids: [B, T] held-out text.
        kind: the drafter's folder.
    """
    small, small_drafter = tiny
    wide, wide_drafter, head = open_pair(folder, kind)
    wide_features = tuple(read_config(folder / kind)["dflash_config"]["target_layer_ids"])
    states, features = small(ids, features=tiny_features)
    wide_states, read = wide(ids, features=wide_features)
    last = ids.shape[1] - 1
    anchors = torch.tensor([[last // 2, last]]).expand(len(ids), -1)
    tokens = ids.gather(1, anchors)
    block = small_drafter(small, features, tokens, anchors)
    wide_block = wide_drafter(wide, read, tokens, anchors)
    best = small.logits(block).argmax(-1)
    before = torch.cat([tokens[..., None], best[..., :-1]], dim=-1)
    return {
        "target": distance(small.logits(states), wide_states, head),
        kind: distance(
            small_drafter.logits(small, block, before),
            wide_block,
            head,
            bias_of(wide_drafter, wide, before, wide_block),
        ),
    }


def bias_of(drafter: Drafter, target: Target, before: Tensor, states: Tensor) -> Tensor | None:
    """[..., V] what the drafter's head adds to the logits, or None without a head."""
    if drafter.head is None:
        return None
    if isinstance(drafter.head, Domino):
        return drafter.head.bias(before, states, target.embed_tokens)
    return drafter.head.bias(before, states)


def held_out(source: Path) -> Tensor:
    """[B, T] token ids: the beginnings of some held-out prompts."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(source / "target" / "tokenizer.json"))
    lines = (source / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    picked = [json.loads(line)["prompt"] for line in lines[:: len(lines) // _PROMPTS]]
    return torch.tensor([tokenizer.encode(text).ids[:_POSITIONS] for text in picked[:_PROMPTS]])
