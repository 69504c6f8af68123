# SPDX-License-Identifier: Apache-2.0
"""Start the demo's engines, decode and print."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import psutil

import benchmarks.demo
from benchmarks import TINY, parser_of
from benchmarks.demo import questions
from benchmarks.demo.pages import print_completion, print_numbers, print_same, print_tree, title
from benchmarks.demo.pair import REAL, CannotWrite, Pair, pair_of
from benchmarks.demo.questions import QUESTIONS, Streamed
from benchmarks.e2e.methods import Target, method_of
from benchmarks.harness.decoder import Decoder, Run, begun, wait_until_started
from benchmarks.harness.engine import Engine, Request
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
    parser.add_argument("--prompts", nargs="+", default=PROMPTS, help="of the tiny pair: ids")
    parser.add_argument("--pair", default=REAL, choices=(REAL, "tiny"))
    given = parser.parse_args(argv)
    pair = pair_of(given.pair)
    try:
        pair.write()
    except CannotWrite as error:
        print(f"Using the tiny pair, which does not have the cost of a real model: {error}.")
        pair = pair_of("tiny")
    print(title(f"Three prompts, three engines: vLLM on this CPU with {pair.name}"), flush=True)
    busy = load_note()
    if busy is not None:
        print(busy, flush=True)
    if pair.chat:
        prompts = QUESTIONS
        requests = questions.requests(pair.folder / "target", prompts)
    else:
        rows = {row["id"]: row for row in load_prompts(TINY / "prompts.jsonl")}
        prompts = [rows[name] for name in given.prompts]
        requests = [Request(row["id"], row["prompt"], TOKENS) for row in prompts]
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
    """Decode with each engine in its own process, one after the other."""
    runs: dict[str, Run] = {}
    with ExitStack() as stack:
        engines = _engines(pair)
        # Each imports vLLM and reads its models while others do; bastion times its steps while it
        # starts, so nothing else runs then.
        for names in (("plain", "dflash"), ("bastion",)):
            progress = Progress(" and ".join(names))
            started = {name: stack.enter_context(begun(engines[name], Decoder)) for name in names}
            for process in started.values():
                wait_until_started(process, progress)
            progress.done(f"started in {progress.seconds:.0f} s")
            for name, process in started.items():
                progress = Progress(name)
                process.call("decode", requests, pair.chat)
                if pair.chat:
                    shown = Streamed(pair.folder / "target", name, prompts)
                    runs[name] = process.answer(items=shown)
                    shown.end()
                else:
                    runs[name] = process.answer(progress)
                # Free its memory before the next engine decodes.
                process.close()
                progress.done(f"decoded in {runs[name].decode_s:.1f} s")
    return runs


def _engines(pair: Pair) -> dict[str, Engine]:
    """The engines of `benchmarks.e2e`, but eager, with a batch of one and little memory."""
    target, drafter = str(pair.folder / "target"), str(pair.folder / "drafter")
    what, environment = Target(target, drafter), {"HF_HUB_OFFLINE": "1", **pair.environment}
    words = {
        "plain": "plain",
        "dflash": f"dflash {pair.chain}",
        "bastion": f"bastion nodes={NODES} budget=adaptive",
    }
    engines = {}
    for name, method in words.items():
        one = method_of(method, what).engine(
            target, cpu=False, dtype="float32", eager=True, timed=True, max_num_seqs=1,
            max_num_batched_tokens=_ROWS, kv_cache_bytes=_KV_CACHE_BYTES,
            probe="benchmarks.probes:trees" if name == "bastion" else None,
        )  # fmt: skip
        own = {key: value for key, value in environment.items() if key not in os.environ}
        engines[name] = replace(one, environment={**one.environment, **own})
    return engines
