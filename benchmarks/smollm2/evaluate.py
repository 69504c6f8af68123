# SPDX-License-Identifier: Apache-2.0
"""Tokens per target forward (tau) of the drafter on measured sets, replayed offline.

    python -m benchmarks.smollm2.evaluate --data humaneval=HumanEval.jsonl gsm8k=test.jsonl

The target's greedy replies are made once by vLLM and kept in the pair's folder; chains and trees
are replayed on them by `benchmarks/tiny/evaluate.py`. Without `--data` the sets come from the Hub.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

import benchmarks.widen  # noqa: F401  (finds benchmarks/tiny)
from benchmarks.paper.chat import Renderer
from benchmarks.paper.data import load_set
from benchmarks.smollm2.rollouts import Engine
from benchmarks.smollm2.target import fetch, pair_folder

from checkpoints import load_target  # isort: skip
from drafter import load_drafter  # isort: skip
from evaluate import GAMMA, Drafts, draft, walk  # isort: skip

SETS = ("humaneval", "gsm8k")
BUDGETS = (None, 8, 16, 32, 64)  # None: the chain


def replies(folder: Path, names: list[str], data: dict[str, Path], samples: int) -> list[dict]:
    """Prompts and greedy replies of the sets, made where they are not kept yet."""
    rows, engine = [], None
    for name in names:
        path = folder / f"{name}-{samples}.jsonl"
        if not path.exists():
            engine = engine or Engine(fetch(), None, seed=0)
            renderer = Renderer(engine.llm.get_tokenizer(), raw=False, limit=1024)
            asked = [renderer.ids(p, []) for p in load_set(name, samples, local=data.get(name))]
            found = engine(asked, 0.0, 256)
            path.parent.mkdir(exist_ok=True)
            path.write_text(
                "".join(
                    json.dumps({"set": name, "prompt": one, "reply": reply}) + "\n"
                    for one, reply in zip(asked, found, strict=True)
                )
            )
        rows += [json.loads(line) for line in path.read_text().splitlines()]
    return rows


def taus(target: torch.nn.Module, drafter: torch.nn.Module, rows: list[dict]) -> dict:
    """{set: {budget: tau}}."""
    counts: dict[str, dict[int | None, list[int]]] = {}
    for row in rows:
        own = counts.setdefault(row["set"], {budget: [0, 0] for budget in BUDGETS})
        start, new = len(row["prompt"]), len(row["reply"])
        if new < 2:
            continue
        ids = torch.tensor(row["prompt"] + row["reply"] + [-1] * (GAMMA + 1))
        lattice = draft(target, drafter, ids.clamp(min=0), start, blocks=new)
        drafts = Drafts(lattice)
        for budget, count in own.items():
            tokens, forwards = walk(drafts, ids.tolist(), start, budget)
            count[0] += tokens
            count[1] += forwards
    return {name: {b: t / f for b, (t, f) in own.items()} for name, own in counts.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.smollm2.evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--sets", nargs="+", default=list(SETS))
    parser.add_argument("--data", nargs="+", default=[], metavar="SET=FILE", help="local copies")
    parser.add_argument("--samples", type=int, default=40, help="prompts of a set")
    parser.add_argument("--drafter", type=Path, help="default: what training wrote")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    data = {name: Path(file) for name, _, file in (one.partition("=") for one in args.data)}
    rows = replies(pair_folder() / "measured", args.sets, data, args.samples)
    target = load_target(fetch()).bfloat16()
    drafter = load_drafter(args.drafter or pair_folder() / "training" / "drafter")
    with torch.autocast("cpu", torch.bfloat16):
        found = taus(target, drafter, rows)
    print("| set | chain | " + " | ".join(f"N = {b}" for b in BUDGETS[1:]) + " |")
    print("|---|" + "---|" * len(BUDGETS))
    for name, own in found.items():
        print(f"| {name} | " + " | ".join(f"{tau:.2f}" for tau in own.values()) + " |")


if __name__ == "__main__":
    main()
