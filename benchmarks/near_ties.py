# SPDX-License-Identifier: Apache-2.0
"""Tell near-ties from errors, by the logits that transformers computes in float32.

Two bfloat16 engines that batch a row differently round its logits differently, and if two tokens
are equally good, either may win. As in the tests on a GPU (`tests/e2e/compare.py`), a token is a
near-tie of the best one if its logit is less than 0.25 below it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

BOUND = 0.25


@dataclass
class Agreement:
    """How many tokens of a text are transformers' best choice, near-ties of it, or neither."""

    best: int = 0
    near_ties: int = 0
    others: int = 0


class Judge:
    """The target in transformers."""

    def __init__(self, target: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(target)

    @torch.inference_mode()
    def gaps(self, prompt: str, token_ids: list[int]) -> torch.Tensor:
        """How far each token's logit is below the best one's after the same text: [tokens]."""
        before = self._tokenizer(prompt)["input_ids"]
        ids = torch.tensor([*before, *token_ids])
        logits = self._model(ids[None]).logits[0, len(before) - 1 : -1]
        chosen = logits.gather(1, ids[len(before) :, None])[:, 0]
        return logits.amax(1) - chosen

    def agreement(self, prompts: list[str], completions: list[list[int]]) -> Agreement:
        """Count the tokens of plain decoding."""
        found = Agreement()
        for prompt, token_ids in zip(prompts, completions, strict=True):
            gaps = self.gaps(prompt, token_ids)
            found.best += int((gaps == 0).sum())
            found.near_ties += int(((gaps > 0) & (gaps < BOUND)).sum())
            found.others += int((gaps >= BOUND).sum())
        return found

    def tied(self, prompt: str, one: list[int], other: list[int]) -> bool:
        """Whether the first tokens that differ are both near-ties of the best."""
        at = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
        texts = (one[: at + 1], other[: at + 1])
        return all(float(self.gaps(prompt, text)[-1]) < BOUND for text in texts)

    @torch.inference_mode()
    def next_logits(self, token_ids: list[int]) -> torch.Tensor:
        """The logits of the token after these: [V] float32."""
        return self._model(torch.tensor([token_ids])).logits[0, -1].float()
