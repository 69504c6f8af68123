# SPDX-License-Identifier: Apache-2.0
"""Print prompts that ask for a small edit, as JSON lines for `python -m benchmarks.e2e --jsonl`.

    python -m benchmarks.made_prompts > editing.jsonl

Each is the beginning of a file of the standard library, and the wish to rename a function.
"""

from __future__ import annotations

import inspect
import json
import re
from importlib import import_module

# Short modules of pure Python whose functions take tens of lines.
_MODULES = (
    "bisect", "colorsys", "stat", "reprlib", "sched", "fnmatch", "shlex", "linecache",
    "textwrap", "heapq", "string", "copy", "quopri", "getopt", "token",
)  # fmt: skip
_CHARACTERS = 2400
_ASKED = "Here is a Python file:\n\n{code}\nRename {name} to {name}_new everywhere, and change \
nothing else. Answer with the whole file only."

if __name__ == "__main__":
    for module in _MODULES:
        code = inspect.getsource(import_module(module))
        code = code[: code.rfind("\n", 0, _CHARACTERS) + 1]
        if first := re.search(r"^ *def (\w+)", code, re.MULTILINE):
            text = _ASKED.format(code=code, name=first[1])
            print(json.dumps({"id": module, "category": "code editing", "prompt": text}))
