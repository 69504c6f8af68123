# SPDX-License-Identifier: Apache-2.0
"""Tokens per target forward (tau) with and without `bastion_lookup`, by set of prompts.

    python -m benchmarks.lookup TARGET DRAFTER --data spec_bench.jsonl gsm8k.jsonl [--editing 8]

A file has a prompt a line: its first of "turns", or "question" or "prompt", and the "category" is
its set, else the file's name. `--editing N` adds N code-editing prompts: a function's file of the
standard library, and a small change that is asked for. One request at a time, at T=0; texts with
and without lookup are compared.
"""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.harness.decoder import Run, count, run_engine
from benchmarks.harness.engine import Engine, Request, bastion

# Short modules of pure Python whose functions take tens of lines.
_MODULES = (
    "bisect", "colorsys", "stat", "keyword", "reprlib", "sched", "fnmatch", "shlex", "linecache",
    "textwrap", "heapq", "string", "copy", "quopri", "getopt", "token",
)  # fmt: skip
_ASKED = "Here is a Python file:\n\n{code}\nRename {name} to {name}_new everywhere, and change \
nothing else. Answer with the whole file only."


def editing_prompts(count: int, characters: int = 2400) -> list[str]:
    """The beginnings of library files, each with a function that is to be renamed."""
    prompts = []
    for name in _MODULES[:count]:
        module = import_module(name)
        code = inspect.getsource(module)
        code = code[: code.rfind("\n", 0, characters) + 1]
        names = [line.split("(")[0][4:] for line in code.split("\n") if line.startswith("def ")]
        prompts.append(_ASKED.format(code=code, name=names[0] if names else "value"))
    return prompts


def read_prompts(path: Path, most: int) -> dict[str, list[str]]:
    """At most so many prompts of each category of a file."""
    sets: dict[str, list[str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        text = row["turns"][0] if "turns" in row else row.get("question") or row["prompt"]
        own = sets.setdefault(row.get("category", path.stem), [])
        if len(own) < most:
            own.append(text)
    return sets


def requests_of(
    target: str, sets: dict[str, list[str]], tokens: int, longest: int
) -> list[Request]:
    """Requests named "set/number", with the target's chat template if it has one."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(target)
    out = []
    for name, prompts in sets.items():
        for i, text in enumerate(prompts):
            ids = tokenizer.encode(text)
            if tokenizer.chat_template:
                turn = [{"role": "user", "content": text}]
                ids = tokenizer.apply_chat_template(
                    turn, add_generation_prompt=True, return_dict=False
                )
            if len(ids) <= longest:
                params = {"ignore_eos": False}
                out.append(Request(f"{name}/{i}", list(ids), tokens, params=params))
    return out


def table(sets: Sequence[str], runs: dict[str, Run]) -> str:
    """tau of each set in each configuration."""
    lines = [f"| tau | {' | '.join(runs)} | same text |", "|---|" + "---|" * (len(runs) + 1)]
    for name in sets:
        own = {
            label: [c for c in run.completions if c.name.split("/")[0] == name]
            for label, run in runs.items()
        }
        first, *others = own.values()
        same = sum(
            all(one.token_ids == other[i].token_ids for other in others)
            for i, one in enumerate(first)
        )
        cells = [f"{count(completions).tau:.2f}" for completions in own.values()]
        lines.append(f"| {name} | {' | '.join(cells)} | {same}/{len(first)} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lookup", description=__doc__)
    parser.add_argument("target")
    parser.add_argument("drafter", type=Path)
    parser.add_argument("--data", type=Path, nargs="*", default=[])
    parser.add_argument("--editing", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=10, help="of each set, at most")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--nodes", type=int, nargs="+", default=[32])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--max-model-len", type=int, default=2048)
    options = parser.parse_args(argv)
    sets: dict[str, list[str]] = {}
    for path in options.data:
        sets |= read_prompts(path, options.prompts)
    if options.editing:
        sets["code editing"] = editing_prompts(options.editing)
    longest = options.max_model_len - options.tokens - max(options.nodes) - 32
    requests = requests_of(options.target, sets, options.tokens, longest)
    runs: dict[str, Run] = {}
    for nodes in options.nodes:
        for lookup in (False, True):
            spec = bastion(options.drafter, nodes, nodes, calibration="off", lookup=lookup)
            engine = Engine(
                spec,
                Path(options.target),
                max_num_batched_tokens=options.max_model_len,
                max_model_len=options.max_model_len,
                dtype=options.dtype,
                prefix_caching=False,
            )
            label = f"N = {nodes}{', lookup' if lookup else ''}"
            runs[label] = run_engine(engine, requests)
    print(table(list(sets), runs))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
