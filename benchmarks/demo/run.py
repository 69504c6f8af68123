# SPDX-License-Identifier: Apache-2.0
"""Start the demo's engines, decode and print."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import psutil

import benchmarks.demo
from benchmarks import TINY, parser_of
from benchmarks.demo import questions
from benchmarks.demo.pages import print_completion, print_numbers, print_same, print_tree, title
from benchmarks.demo.pair import REAL, SHAPE, CannotWrite, Pair, pair_of, tiny_pair
from benchmarks.demo.questions import QUESTIONS, Streamed
from benchmarks.harness.decoder import IMPORTS, Decoder, Run
from benchmarks.harness.engine import Engine, Request, bastion
from benchmarks.harness.process import EngineProcess
from benchmarks.paper.methods import ADAPTIVE, PLAIN, Target, chain_name, methods
from benchmarks.progress import Progress
from benchmarks.prompts import load_prompts

# Of the toys, which continue text: ids in prompts.jsonl.
PROMPTS = ("code-made-05", "arithmetic-15", "chat-20")
TOKENS = 48
# Nodes of a tree, rows of a step, and the cache. Small, because bastion times steps up to these
# sizes while it starts.
NODES, _ROWS, _KV_CACHE_BYTES = 31, 48, 256 << 20


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(benchmarks.demo.__doc__)
    parser.add_argument("--prompts", nargs="+", default=PROMPTS, help="of a toy pair: ids")
    parser.add_argument(
        "--pair",
        default=REAL,
        help=f"{REAL}, {SHAPE}, tiny, or a folder of target and drafter (default {REAL})",
    )
    given = parser.parse_args(argv)
    if given.pair not in (REAL, SHAPE, "tiny") and not Path(given.pair, "target").is_dir():
        parser.error(f"{given.pair} has no target and drafter")
    rows = {row["id"]: row for row in load_prompts(TINY / "prompts.jsonl")}
    pair = pair_of(given.pair)
    if pair.chat:
        try:
            pair.write()
        except CannotWrite as error:
            pair = tiny_pair(str(error))
    prompts = QUESTIONS if pair.chat else [rows[name] for name in given.prompts]
    print(title(f"Three prompts, three engines: vLLM on this CPU with {pair.name}"), flush=True)
    busy = load_note()
    if busy is not None:
        print(busy, flush=True)
    if pair.chat:
        requests = questions.requests(pair.folder / "target", prompts)
    else:
        requests = [Request(row["id"], row["prompt"], TOKENS) for row in prompts]
    try:
        runs = decode(pair, requests, prompts)
    except CannotWrite as error:
        pair = tiny_pair(str(error))
        runs = decode(pair, requests, prompts)
    if pair.chat:
        print(title("The same tokens"))
    for index, row in enumerate(prompts):
        by_mode = {name: run.completions[index] for name, run in runs.items()}
        if pair.chat:
            print_same(by_mode, f"{row['domain']}: ")
        else:
            print_completion(row, by_mode)
    print_numbers(pair, NODES, prompts, runs)
    if busy is not None:
        print(busy)
    print_tree(pair.folder / "target", prompts, runs["bastion"].probed)
    return 0


def load_note() -> str | None:
    """What to say of this run's seconds if other processes use the cores; else None."""
    busy = psutil.cpu_percent(interval=1.0)
    if busy < 25:
        return None
    return (
        f"Other processes use {busy:.0f}% of this machine: the seconds and speed-ups of this run "
        "mean nothing, its texts and tau do."
    )


def decode(pair: Pair, requests: list[Request], prompts: list[dict[str, str]]) -> dict[str, Run]:
    """Decode with each engine in its own process, one after the other.

    Raises CannotWrite: the disk has no room for the pair after all.
    """
    runs: dict[str, Run] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        chosen = _engines(pair)
        processes: dict[str, EngineProcess] = {}
        for name, engine in chosen.items():
            log = folder / f"{name}.log"
            processes[name] = EngineProcess(log, engine.variables(), IMPORTS)
            stack.callback(processes[name].close)
        # Write the pair while the processes import vLLM.
        pair.write()
        progress = Progress("engines")
        for process in processes.values():
            process.answer(progress)
        # bastion measures its step costs while it starts, so nothing else runs then.
        for names in (("plain", "dflash"), ("bastion",)):
            progress = Progress(" and ".join(names))
            for name in names:
                processes[name].start(Decoder, chosen[name])
            for name in names:
                processes[name].answer(progress)
            progress.done(f"started in {progress.seconds:.0f} s")
            for name in names:
                progress = Progress(name)
                processes[name].call("decode", requests, pair.chat)
                if pair.chat:
                    shown = Streamed(pair.folder / "target", name, prompts)
                    runs[name] = processes[name].answer(items=shown)
                    shown.end()
                else:
                    runs[name] = processes[name].answer(progress)
                # Free its memory before the next engine decodes.
                processes[name].close()
                progress.done(f"decoded in {runs[name].decode_s:.1f} s")
    return runs


def _engines(pair: Pair) -> dict[str, Engine]:
    """The engines of `benchmarks.paper`, but eager, with a batch of one and little memory."""
    target = str(pair.folder / "target")
    named = methods(Target(target, str(pair.folder / "drafter"), pair.gamma), cpu=True)
    small = {"max_num_seqs": 1, "max_num_batched_tokens": _ROWS, "kv_cache_bytes": _KV_CACHE_BYTES}
    rows = {
        name: named[name].engine(target, False, dtype=pair.dtype, eager=True, timed=True, **small)
        for name in (PLAIN, chain_name(pair.chain), ADAPTIVE)
    }
    trees = bastion(pair.folder / "drafter", NODES, "adaptive")
    chosen = {
        "plain": rows[PLAIN],
        "dflash": rows[chain_name(pair.chain)],
        "bastion": replace(rows[ADAPTIVE], speculative=trees, probe="benchmarks.probes:trees"),
    }
    wanted = {"HF_HUB_OFFLINE": "1", **pair.environment}
    own = {name: value for name, value in wanted.items() if name not in os.environ}
    for name, engine in chosen.items():
        chosen[name] = replace(engine, environment={**engine.environment, **own})
    return chosen
