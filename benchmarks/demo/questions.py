# SPDX-License-Identifier: Apache-2.0
"""The questions of the demo with a chat model, and the streamed answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.chat import Renderer
from benchmarks.demo.pages import print_piece, print_text, title
from benchmarks.harness.engine import Request
from benchmarks.prompts import Prompt

_ASKED = {
    "code": "Write a Python function that returns the most frequent word of a text.",
    "arithmetic": "A baker sells 14 loaves in the morning and 9 in the afternoon, each for 4 "
    "dollars. How much does she earn in 5 days? Think step by step.",
    "prose": "Why is the sky blue?",
}
QUESTIONS = [{"id": name, "domain": name, "prompt": text} for name, text in _ASKED.items()]
TOKENS = 128


def requests(target: Path, questions: list[dict[str, str]]) -> list[Request]:
    """The questions in the target's chat template, each answered up to the end of its turn."""
    from transformers import AutoTokenizer

    renderer = Renderer(AutoTokenizer.from_pretrained(target), raw=False, limit=1024)
    asked = []
    for row in questions:
        ids = renderer.ids(Prompt(row["domain"], row["id"], (row["prompt"],)), [])
        asked.append(Request(row["id"], ids, TOKENS, params={"ignore_eos": False}))
    return asked


class Streamed:
    """Prints what an engine emits as soon as it is emitted.

    name: the engine's, for the headings.
    """

    def __init__(self, target: Path, name: str, questions: list[dict[str, str]]) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
        self._name, self._questions = name, questions
        self._number, self._ids, self._shown = -1, [], ""

    def __call__(self, item: Any) -> None:
        """Print an item of `Decoder.decode`: the number of a request, and new token ids."""
        number, ids = item
        if number != self._number:
            self.end()
            self._number, self._ids, self._shown = number, [], ""
            print(title(f"{self._name}: {self._questions[number]['domain']}"))
            print_text(self._questions[number]["prompt"], "note")
        self._ids += ids
        text = self._tokenizer.decode(self._ids)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # part of a character
            print_piece(text[len(self._shown) :])
            self._shown = text

    def end(self) -> None:
        if self._number >= 0:
            print("\n")
