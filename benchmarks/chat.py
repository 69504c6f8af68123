# SPDX-License-Identifier: Apache-2.0
"""From a conversation to the token ids that an engine gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.prompts import Prompt


class Renderer:
    """Applies a target's chat template, with thinking off, and limits the length.

    Args:
        tokenizer: of transformers.
        raw: join turns and replies as plain text, for targets without instruction tuning.
        limit: most tokens of a prompt. Of a longer one the middle is left out.
    """

    def __init__(self, tokenizer: Any, raw: bool, limit: int) -> None:
        self._tokenizer, self._raw, self._limit = tokenizer, raw, limit

    def ids(self, prompt: Prompt, replies: Sequence[Sequence[int]]) -> list[int]:
        """The prompt of turn number `len(replies)`, given the replies to the turns before."""
        texts = [self._tokenizer.decode(ids, skip_special_tokens=True) for ids in replies]
        turns = prompt.turns[: len(replies) + 1]
        if self._raw:
            parts = [part for pair in zip(turns, texts, strict=False) for part in pair]
            text = "\n".join([*parts, turns[-1]])
            ids = self._tokenizer(text)["input_ids"]
        else:
            messages = []
            for number, turn in enumerate(turns):
                messages.append({"role": "user", "content": turn})
                if number < len(texts):
                    messages.append({"role": "assistant", "content": texts[number]})
            text = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, enable_thinking=False, tokenize=False
            )
            # The template has written the special tokens.
            ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) > self._limit:
            half = self._limit // 2
            ids = [*ids[: self._limit - half], *ids[-half:]]
        return list(ids)
