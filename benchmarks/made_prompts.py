# SPDX-License-Identifier: Apache-2.0
"""Print prompts of our own as JSON lines, for `--jsonl` of `python -m benchmarks.e2e`.

    python -m benchmarks.made_prompts editing > editing.jsonl
    python -m benchmarks.made_prompts passages 1024 4096 --number 6 > passages.jsonl

editing: the beginning of a file of the standard library, and the wish to rename a function.
passages: numbered texts of the tiny pair's generators, of that many of its tokens; the end repeats
a piece of an early one, so that the continuation stands far above, as in LongBench's passage
retrieval. Prompts of a length are a set, and all begin with the same passages.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from importlib import import_module
from random import Random
from typing import Any

from benchmarks import TINY, parser_of
from benchmarks.tiny import text_arithmetic, text_chat, text_code

# Short modules of pure Python whose functions take tens of lines.
_MODULES = (
    "bisect", "colorsys", "stat", "reprlib", "sched", "fnmatch", "shlex", "linecache",
    "textwrap", "heapq", "string", "copy", "quopri", "getopt", "token",
)  # fmt: skip
_CHARACTERS = 2400
_ASKED = "Here is a Python file:\n\n{code}\nRename {name} to {name}_new everywhere, and change \
nothing else. Answer with the whole file only."
_TEXTS = (text_arithmetic, text_chat, text_code)
_LEAD = 24  # tokens of the passage that a prompt repeats


def editing() -> Iterator[dict[str, str]]:
    """A row for each module that has a function, see `benchmarks.prompts.load_jsonl`."""
    for module in _MODULES:
        code = inspect.getsource(import_module(module))
        code = code[: code.rfind("\n", 0, _CHARACTERS) + 1]
        if first := re.search(r"^ *def (\w+)", code, re.MULTILINE):
            text = _ASKED.format(code=code, name=first[1])
            yield {"id": module, "category": "code editing", "prompt": text}


def passages(lengths: list[int], number: int) -> Iterator[dict[str, str]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TINY / "target")
    for length in lengths:
        for i in range(number):
            text = tokenizer.decode(passage(tokenizer, length, i)[0])
            yield {"id": f"{length}-{i}", "category": f"{length} tokens", "prompt": text}


def passage(tokenizer: Any, length: int, number: int) -> tuple[list[int], list[int]]:
    """A prompt of `length` tokens, whose end repeats a piece of a passage, and how that goes on."""
    rng = Random("passages")
    texts: list[list[int]] = []
    total = 0
    while total < length:
        text = rng.choice(_TEXTS).document(rng)
        ids = tokenizer(f"Passage {len(texts) + 1}:\n{text.strip()}\n\n")["input_ids"]
        texts.append(ids)
        total += len(ids)
    # Of the first quarter, and long enough to go on with.
    first = texts[: max(1, len(texts) // 4)]
    early = [ids for ids in first if len(ids) > 2 * _LEAD] or first[:1]
    chosen = early[number % len(early)]
    # Further numbers begin further on in the passage.
    begin = 3 * _LEAD * (number // len(early)) % max(1, len(chosen) - 2 * _LEAD)
    end = [*tokenizer("\n\n")["input_ids"], *chosen[begin : begin + _LEAD]]
    flat = [token for ids in texts for token in ids]
    return [*flat[: length - len(end)], *end], chosen[begin + _LEAD :]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("kind", choices=("editing", "passages"))
    parser.add_argument("lengths", nargs="*", type=int, help="of passages, in tokens")
    parser.add_argument("--number", type=int, default=1, help="prompts of each length")
    given = parser.parse_args()
    rows = editing() if given.kind == "editing" else passages(given.lengths, given.number)
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
