# SPDX-License-Identifier: Apache-2.0
"""Time per token and tau by the length of the context, on texts that refer far back.

    python -m benchmarks.paper contexts --pair 0.6B          # 1k, 4k, 8k and 16k tokens
    python -m benchmarks.paper contexts --pair tiny --contexts 512 1024 2048 4000

A prompt is a list of numbered passages by this project's text generators; its end repeats a piece
of one of them, so the continuation stands far above (as in LongBench's passage retrieval). All
prompts begin with the same passages, so an engine computes them once and has them in its prefix
cache. *Copied* is the share of the first new tokens that repeat the passage. *Attention* is the
time of all attention layers in a step, the drafter's too: vLLM's kernel for plain decoding and its
chains, this plugin's for trees. On a GPU, where FULL graphs hide the layers, it is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from benchmarks import RESULTS
from benchmarks.paper.arguments import pair_dtype, pair_folder, without_folders
from benchmarks.paper.chat import Renderer
from benchmarks.paper.data import Prompt
from benchmarks.paper.judge import judge_all
from benchmarks.paper.methods import (
    ADAPTIVE,
    CHAIN,
    PLAIN,
    Target,
    chain_name,
    chosen,
    engines_of,
    fixed_name,
    methods,
)
from benchmarks.paper.plan import Plan
from benchmarks.paper.run import Runner
from benchmarks.paper.stats import Cell, speedup
from benchmarks.paper.store import Store
from benchmarks.provenance import provenance
from vllm_bastion.envs import cache_dir

_METHODS = (PLAIN, chain_name(7), CHAIN, fixed_name(16), fixed_name(63), ADAPTIVE)
_DOMAINS = ("arithmetic", "chat", "code")
_LEAD = 24  # tokens of the passage that a prompt repeats
_SPARE = 32


def passages(tokenizer: Any, length: int, number: int) -> tuple[list[int], list[int]]:
    """A prompt of `length` tokens, whose end repeats a piece of a passage, and how that goes on."""
    from benchmarks.tiny import data

    rng = Random("passages")
    texts: list[list[int]] = []
    total = 0
    while total < length:
        text = data.generate_documents(rng.choice(_DOMAINS), 1, rng)[0]
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


def longer(name: str, pair: Path, positions: int) -> Path:
    """The pair with room for that many positions in its configs; weights are linked.

    The folder is always the same one, because code that vLLM compiles is stored by it.
    """
    longer_pair = cache_dir() / "long" / f"{name}-{positions}"
    shutil.rmtree(longer_pair, ignore_errors=True)
    for kind in ("target", "drafter"):
        folder = longer_pair / kind
        folder.mkdir(parents=True)
        for path in (pair / kind).iterdir():
            (folder / path.name).symlink_to(path.resolve())
        config = json.loads((folder / "config.json").read_text())
        config["max_position_embeddings"] = max(config["max_position_embeddings"], positions)
        (folder / "config.json").unlink()
        (folder / "config.json").write_text(json.dumps(config))
    return longer_pair


def main(argv: Sequence[str]) -> int:
    """Entry point of `python -m benchmarks.paper contexts`."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.paper contexts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--pair", default="0.6B", help="tiny, or a shape of benchmarks.widen")
    add("--contexts", nargs="+", type=int, default=[1024, 4096, 8192, 16384], help="tokens")
    add("--prompts", type=int, default=1, help="of each length (default 1)")
    add("--tokens", type=int, default=48, help="new tokens (default 48)")
    add("--temperatures", nargs="+", type=float, default=[0.0])
    add("--methods", nargs="+", default=[], help="their names, or parts of names; plain always")
    add("--alive", type=int, default=1, help="engines side by side; each group has plain's again")
    add("--dtype", help="default: bfloat16; float32 for the tiny pair")
    add("--eager", action="store_true", help="without torch.compile")
    add("--out", type=Path, help="the JSONL file")
    given = parser.parse_args(argv)
    import torch
    from transformers import AutoTokenizer

    from vllm_bastion.policy.cost.devices import device_name

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    cpu = not torch.cuda.is_available()
    dtype, source = given.dtype or pair_dtype(given.pair), pair_folder(given.pair)
    tokenizer = AutoTokenizer.from_pretrained(source / "target")
    prompts, texts, wanted = [], {}, {}
    for length in sorted(given.contexts):
        for number in range(given.prompts):
            prompt = Prompt(f"{length}", f"{length}-{number}", ("",))
            prompts.append(prompt)
            texts[prompt.id], wanted[prompt.id] = passages(tokenizer, length, number)
    longest = max(given.contexts) + given.tokens + _SPARE
    pair = longer(given.pair, source, longest)
    what = Target(str(pair / "target"), str(pair / "drafter"), 15)
    rows = methods(what, cpu=cpu, budgets=(16, 63), nodes=63)
    rows = {name: rows[name] for name in _METHODS}
    rows = chosen(rows, given.methods, False)
    engine = engines_of(
        what, cpu, given.alive, max_model_len=longest, dtype=dtype, eager=given.eager
    )
    settings = {"target": given.pair, "drafter": given.pair, "eagle3": None, "dtype": dtype}
    settings |= {"tokens": given.tokens, "seed": 0, "raw": True, "ignore_eos": True}
    settings |= {"samples": given.prompts, "alive": given.alive}
    source_row = provenance(["contexts", *without_folders(argv)])
    source_row["device"] = device_name("cpu" if cpu else "cuda")
    header = {"name": f"{given.pair}, long contexts", "provenance": source_row}
    out = given.out or RESULTS / "paper" / f"contexts-{given.pair}.jsonl"
    plan = Plan(rows, prompts, given.temperatures, [1], given.tokens, 0, True, given.alive)
    with Store(out, settings, header) as store:
        runner = Runner(plan, store, _Fixed(tokenizer, texts), engine)
        runner.run()
        judge_all(store, engine(rows[PLAIN], 1), runner.prompt_and_reply, dtype)
    return write(out, wanted)


class _Fixed(Renderer):
    """Prompts that are token ids already."""

    def __init__(self, tokenizer: Any, texts: dict[str, list[int]]) -> None:
        super().__init__(tokenizer, True, 0)
        self._texts = texts

    def ids(self, prompt: Prompt, replies: Sequence[Sequence[int]]) -> list[int]:
        return self._texts[prompt.id]


def write(path: Path, wanted: dict[str, list[int]]) -> int:
    """Write the page and figures beside the results file, and print the page."""
    from benchmarks.paper import report

    (machine,) = report.machines([path])
    lines = [report.markdown(machine), "## By context", ""]
    for temperature, _ in machine.situations():
        lines += [f"T={temperature:g}", ""]
        lines += by_context(machine.cells(temperature, 1), wanted)
    page = "\n".join(lines)
    path.with_suffix(".md").write_text(page)
    report.figures.draw(machine, path.parent, path.stem)
    print(page)
    return 0


def by_context(cells: dict[str, dict[str, Cell]], wanted: dict[str, list[int]]) -> list[str]:
    """A row per method and length."""
    lines = [
        "| context | | ms/token | speed-up | tau | N | T_verify | attention | of the step "
        "| C(N) predicted / measured | copied |",
        "|---" * 11 + "|",
    ]
    plain = cells[PLAIN]
    for length in plain:
        for method, sets in cells.items():
            if length not in sets:
                continue
            cell = sets[length]
            found = cell.numbers()
            attention, step = cell.rate("attention_ms", "steps"), cell.rate("step_ms", "steps")
            row = [length, method, f"{found['token_ms']:.2f}"]
            row.append(f"{speedup([(plain[length], cell)]).mean:.2f}x")
            row += [f"{found[key]:.{d}f}" for key, d in (("tau", 2), ("nodes", 1))]
            row += [f"{found['verify_ms']:.2f}"]
            row += [f"{attention:.2f}", f"{attention / step:.0%}"] if attention else ["", ""]
            predicted = cell.rate("predicted_ms", "timed_steps")
            measured = cell.rate("measured_ms", "timed_steps")
            known = measured == measured
            row.append(f"{predicted:.1f} / {measured:.1f} ms" if known else "")
            row.append(copied(cell, wanted) if method == PLAIN else "")
            lines.append(f"| {' | '.join(row)} |")
    return [*lines, ""]


def copied(cell: Cell, wanted: dict[str, list[int]]) -> str:
    """The share of tokens that repeat the passage, before its end."""
    shares = []
    for row in cell.rows:
        pairs = list(zip(row["token_ids"], wanted.get(row["id"], []), strict=False))
        if pairs:
            shares.append(fmean(one == other for one, other in pairs))
    return f"{fmean(shares):.0%}" if shares else ""
