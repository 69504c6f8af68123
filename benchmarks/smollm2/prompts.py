# SPDX-License-Identifier: Apache-2.0
"""What the target is asked, for the drafter's training. Nothing of a measured set is among it.

gsm8k  questions of GSM8K's training split, in the paper's template
code   functions of installed Python packages up to their docstring, in HumanEval's template
own    instructions that the target writes itself, given only the first words of a user's turn
"""

from __future__ import annotations

import ast
import importlib.util
import json
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from random import Random

from benchmarks.e2e.data import SETS
from benchmarks.smollm2.target import pair_folder

SOURCES = ("gsm8k", "code", "own")
_PACKAGES = ("numpy", "scipy", "pandas", "transformers", "torch", "networkx", "sympy", "sklearn")
_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
# The first words of instructions. The empty one leaves everything to the target.
_OPENINGS = (
    "",
    "",
    "Write a Python function",
    "Write a function to",
    "Write a python function to find",
    "Implement a class",
    "Write a program that",
    "Given a list of numbers,",
    "Write a short story about",
    "Write an email to",
    "Explain how",
    "What is the difference between",
    "Why do",
    "Summarize the following text:",
    "Translate",
    "Describe",
    "Imagine you are",
    "How many",
    "If a train",
    "Solve",
    "List",
    "Edit the following",
    "Compose",
    "Rewrite",
    "Which",
    "Who",
)


def gsm8k(file: Path | None) -> list[str]:
    """The training questions, from the published file or through `datasets`."""
    known = SETS["gsm8k"]
    if file is not None:
        rows = [json.loads(line) for line in file.read_text().splitlines()]
    else:
        import datasets

        rows = list(datasets.load_dataset(known.path, known.subset, split="train"))
    texts = [known.turns(row)[0] for row in rows]
    Random(1).shuffle(texts)
    return texts


def code() -> list[str]:
    """Documented functions of the standard library and of installed packages; found once."""
    found = pair_folder() / "code.json"
    if found.exists():
        return json.loads(found.read_text())
    roots = [Path(sysconfig.get_path("stdlib"))]
    for name in _PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            roots.append(Path(spec.origin).parent)
    heads = sorted({head for root in roots for head in _heads(root)})
    Random(2).shuffle(heads)
    texts = [SETS["humaneval"].turns({"prompt": head})[0] for head in heads]
    found.write_text(json.dumps(texts))
    return texts


def _heads(root: Path) -> Iterator[str]:
    for path in sorted(root.rglob("*.py")):
        if "site-packages" in path.relative_to(root).parts or path.stat().st_size > 300_000:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError, RecursionError):
            continue
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                text = ast.get_docstring(node)
                if text and 60 < len(text) < 700 and node.args.args and not node.decorator_list:
                    node.body = node.body[:1]
                    yield ast.unparse(node)


def own(count: int) -> list[str]:
    """Beginnings of conversations, up to the first words of the user's turn."""
    random = Random(3)
    start = f"<|im_start|>system\n{_SYSTEM}<|im_end|>\n<|im_start|>user\n"
    return [start + random.choice(_OPENINGS) for _ in range(count)]
