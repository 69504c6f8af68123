# SPDX-License-Identifier: Apache-2.0
"""Print code-editing prompts as JSON lines, for `--jsonl` of `python -m benchmarks.paper`.

    python -m benchmarks.paper.editing > editing.jsonl

Each prompt is the beginning of a file of the standard library, and asks to rename a function.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from importlib import import_module

# Short modules of pure Python whose functions take tens of lines.
_MODULES = (
    "bisect", "colorsys", "stat", "reprlib", "sched", "fnmatch", "shlex", "linecache",
    "textwrap", "heapq", "string", "copy", "quopri", "getopt", "token",
)  # fmt: skip
_CHARACTERS = 2400
_ASKED = "Here is a Python file:\n\n{code}\nRename {name} to {name}_new everywhere, and change \
nothing else. Answer with the whole file only."


def rows() -> Iterator[dict[str, str]]:
    """A row for each module that has a function, see `benchmarks.paper.data.load_jsonl`."""
    for module in _MODULES:
        code = inspect.getsource(import_module(module))
        code = code[: code.rfind("\n", 0, _CHARACTERS) + 1]
        if first := re.search(r"^ *def (\w+)", code, re.MULTILINE):
            text = _ASKED.format(code=code, name=first[1])
            yield {"id": module, "category": "code editing", "prompt": text}


if __name__ == "__main__":
    for row in rows():
        print(json.dumps(row))
