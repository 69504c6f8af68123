# SPDX-License-Identifier: Apache-2.0
"""What the target is asked, for the drafter's training. Nothing of a measured set is among it.

gsm8k  questions of GSM8K's training split, in the paper's template
code   functions of installed Python packages up to their docstring, in HumanEval's template
text   docstrings of installed packages to summarise, extract from, translate or ask about
edit   functions of installed packages to change, explain or test
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

SOURCES = ("gsm8k", "code", "text", "edit", "own")
_PACKAGES = ("numpy", "scipy", "pandas", "transformers", "torch", "networkx", "sympy", "sklearn")
_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
# Of `own` the first words; the empty ones leave everything to the target.
_INSTRUCTIONS = json.loads((Path(__file__).parent / "instructions.json").read_text())


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


def from_packages() -> dict[str, list[str]]:
    """Prompts `code`, `text` and `edit` of the standard library and installed packages."""
    found = pair_folder() / "packages.json"
    if found.exists():
        return json.loads(found.read_text())
    roots = [Path(sysconfig.get_path("stdlib"))]
    for name in _PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            roots.append(Path(spec.origin).parent)
    pieces = sorted({piece for root in roots for piece in _pieces(root)})
    Random(2).shuffle(pieces)
    prompts: dict[str, list[str]] = {"code": [], "text": [], "edit": []}
    random = Random(4)
    for source, piece in pieces:
        whole = piece if source == "code" else f"{random.choice(_INSTRUCTIONS[source])}\n\n{piece}"
        prompts[source].append(whole)
    found.write_text(json.dumps(prompts))
    return prompts


def _pieces(root: Path) -> Iterator[tuple[str, str]]:
    """(source, text) of every function and docstring of a folder that is of a fitting length."""
    for path in sorted(root.rglob("*.py")):
        if "site-packages" in path.relative_to(root).parts or path.stat().st_size > 300_000:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError, RecursionError):
            continue
        for node in (tree, *tree.body):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                continue
            text = ast.get_docstring(node) or ""
            if 400 < len(text) < 4000:
                yield "text", text
            if isinstance(node, ast.FunctionDef) and node.args.args:
                if 200 < len(whole := ast.unparse(node)) < 1500:
                    yield "edit", f"```python\n{whole}\n```"
                public = not node.name.startswith("_") and not node.decorator_list
                if public and 60 < len(text) < 700:
                    node.body = node.body[:1]
                    yield "code", SETS["humaneval"].turns({"prompt": ast.unparse(node)})[0]


def own(count: int) -> list[str]:
    """Beginnings of conversations, up to the first words of the user's turn."""
    random = Random(3)
    start = f"<|im_start|>system\n{_SYSTEM}<|im_end|>\n<|im_start|>user\n"
    return [start + random.choice(_INSTRUCTIONS["own"]) for _ in range(count)]
