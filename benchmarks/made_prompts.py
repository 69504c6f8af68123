# SPDX-License-Identifier: Apache-2.0
"""Print prompts of our own as JSON lines, for `--jsonl` of `python -m benchmarks.e2e`.

    python -m benchmarks.made_prompts editing > editing.jsonl
    python -m benchmarks.made_prompts passages 1024 4096 --number 6 > passages.jsonl

editing: the beginning of a file of the standard library, and the wish to rename a function.
passages: numbered functions of the standard library, together that many tokens of the tiny pair;
the end repeats the first lines of an early one, so that the continuation stands far above, as in
LongBench's passage retrieval. Prompts of a length are a set, and all begin with the same passages.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from importlib import import_module
from itertools import cycle

from benchmarks import TINY, parser_of

# Short modules of pure Python whose functions take tens of lines.
_MODULES = (
    "bisect", "colorsys", "stat", "reprlib", "sched", "fnmatch", "shlex", "linecache",
    "textwrap", "heapq", "string", "copy", "quopri", "getopt", "token",
)  # fmt: skip
_CHARACTERS = 2400
_ASKED = "Here is a Python file:\n\n{code}\nRename {name} to {name}_new everywhere, and change \
nothing else. Answer with the whole file only."
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
    functions = [
        inspect.getsource(function)
        for module in map(import_module, _MODULES)
        for _, function in inspect.getmembers(module, inspect.isfunction)
    ]
    for length in lengths:
        texts: list[list[int]] = []
        for text in cycle(functions):
            texts.append(tokenizer(f"# Passage {len(texts) + 1}\n{text}\n")["input_ids"])
            if sum(map(len, texts)) >= length:
                break
        flat = [token for ids in texts for token in ids]
        for i in range(number):
            end = texts[i % max(1, len(texts) // 4)][:_LEAD]
            text = tokenizer.decode([*flat[: length - _LEAD], *end])
            yield {"id": f"{length}-{i}", "category": f"{length} tokens", "prompt": text}


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
