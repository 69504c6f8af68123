# SPDX-License-Identifier: Apache-2.0
"""The command `python -m benchmarks.demo`: start the engines, decode and print."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from tokenizers import Tokenizer
from transformers import AutoTokenizer

import benchmarks.demo
from benchmarks import TINY, parser_of
from benchmarks.chat import Renderer
from benchmarks.demo.pages import (
    Streamed,
    print_notes,
    print_numbers,
    print_same,
    print_tree,
    title,
)  # fmt: skip
from benchmarks.e2e.methods import Target, method_of
from benchmarks.harness.driver import Response, start_driver
from benchmarks.harness.engine import Engine, Request
from benchmarks.harness.process import begun
from benchmarks.prompts import Prompt, load_jsonl
from benchmarks.smollm2.install import pair as real_pair
from benchmarks.smollm2.target import CannotFetch

# Nodes of a tree, query tokens of a step, and the cache: small, for a machine with little memory.
NODES, _ROWS, _KV_CACHE_BYTES = 31, 48, 256 << 20
_WARM_UP_TOKENS = 24
_ASKED = {
    "code": "Write a Python function that returns the most frequent word of a text.",
    "arithmetic": "A baker sells 14 loaves in the morning and 9 in the afternoon, each for 4 "
    "dollars. How much does she earn in 5 days? Think step by step.",
    "prose": "Why is the sky blue?",
}
# The tiny pair continues texts: ids in its prompts.jsonl.
_CONTINUED = ("code-made-05", "arithmetic-15", "chat-20")


@dataclass(frozen=True)
class Pair:
    """A pair in float32; `chain` is the fastest length of vLLM's own chain.

    environment: variables of its engines.
    """

    folder: Path
    name: str
    note: str
    chain: int
    tokens: int
    environment: dict[str, str]


def pair_of(name: str) -> Pair:
    """Raises CannotFetch: the real pair is not here and cannot be had."""
    if name == "tiny":
        note = "With models this small a step is mostly Python, and trees gain little."
        # Waking a second thread costs more than it saves.
        return Pair(TINY, "the tiny pair", note, 15, 48, {"OMP_NUM_THREADS": "1"})
    note = (
        "The drafter was trained by this project (benchmarks/smollm2). In float32 all engines emit"
        " the same tokens; in bf16 this target's best two are often equally good."
    )
    return Pair(real_pair(), "SmolLM2-135M-Instruct", note, 3, 128, {})


def prompts_of(pair: Pair) -> Iterator[tuple[str, str, Request]]:
    """(domain, text, request) of each prompt; questions get the target's chat template."""
    if pair.folder == TINY:
        for one in load_jsonl(TINY / "prompts.jsonl"):
            if one.id in _CONTINUED:
                yield one.set, one.turns[0], Request(one.id, one.turns[0], pair.tokens)
        return
    tokenizer = AutoTokenizer.from_pretrained(pair.folder / "target")
    renderer = Renderer(tokenizer, raw=False, limit=1024)
    for domain, text in _ASKED.items():
        ids = renderer.ids(Prompt(domain, domain, (text,)), [])
        yield domain, text, Request(domain, ids, pair.tokens, params={"ignore_eos": False})


def engines_of(pair: Pair) -> dict[str, Engine]:
    """The engines of `benchmarks.e2e`, but eager, with a batch of one and little memory."""
    target = str(pair.folder / "target")
    what = Target(target, str(pair.folder / "drafter"))
    words = {
        "plain": "plain",
        "dflash": f"dflash {pair.chain}",
        "bastion": f"bastion nodes={NODES}",
    }
    engines = {}
    for name, own in words.items():
        engine = method_of(own, what).engine(
            target, cpu=False, dtype="float32", eager=True, max_num_seqs=1,
            max_num_batched_tokens=_ROWS, kv_cache_bytes=_KV_CACHE_BYTES,
            probe="benchmarks.probes:trees" if name == "bastion" else None,
        )  # fmt: skip
        environment = {**engine.environment, "HF_HUB_OFFLINE": "1", **pair.environment}
        engines[name] = replace(engine, environment=environment)
    return engines


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(benchmarks.demo.__doc__)
    parser.add_argument("--pair", default="smollm2", choices=("smollm2", "tiny"))
    given = parser.parse_args(argv)
    try:
        pair = pair_of(given.pair)
    except CannotFetch as error:
        print(f"Using the tiny pair, which does not have the cost of a real model: {error}.")
        pair = pair_of("tiny")
    print(title(f"Three prompts, three engines: vLLM on this CPU with {pair.name}"), flush=True)
    busy = psutil.cpu_percent(interval=1.0)
    note = f"Other processes use {busy:.0f}% of this machine: the seconds of this run mean nothing."
    if busy >= 25:
        print(note, flush=True)
    domains, texts, requests = zip(*prompts_of(pair), strict=True)
    tokenizer = Tokenizer.from_file(str(pair.folder / "target" / "tokenizer.json"))
    runs: dict[str, list[Response]] = {}
    with ExitStack() as stack:
        engines = engines_of(pair)
        # The first two import vLLM and read their models side by side; bastion times its steps
        # while it starts, so nothing else runs then.
        for names in (("plain", "dflash"), ("bastion",)):
            print(f"Starting {' and '.join(names)}", flush=True)
            started = {name: stack.enter_context(begun(engines[name])) for name in names}
            for name, process in started.items():
                process.answer()
                process.start(start_driver, engines[name])
            for process in started.values():
                process.answer()
            for name, process in started.items():
                warm_up = replace(requests[0], max_tokens=_WARM_UP_TOKENS, params={})
                process.call("drive", [warm_up], 1)
                process.answer()
                process.call("drive", list(requests), 1, math.inf, True)
                shown = Streamed(tokenizer, name, domains, texts)
                runs[name] = process.answer(items=shown)
                shown.end()
                if name == "bastion":
                    process.call("probed")
                    trees = process.answer()
                process.close()  # free its memory before the next engine decodes
    print(title("The same tokens"))
    for index, domain in enumerate(domains):
        ids = {name: run[index].token_ids for name, run in runs.items()}
        print_same(domain, tokenizer, ids)
    print_numbers(domains, runs)
    print_notes(NODES, pair.chain, pair.note)
    if busy >= 25:
        print(note)
    print_tree(tokenizer, domains, trees)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
