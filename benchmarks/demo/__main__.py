# SPDX-License-Identifier: Apache-2.0
"""The command `python -m benchmarks.demo`: start the engines, decode and print."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import psutil
from tokenizers import Tokenizer
from transformers import AutoTokenizer

import benchmarks.demo
from benchmarks import parser_of
from benchmarks.chat import Renderer
from benchmarks.demo import pages
from benchmarks.e2e.methods import Target, method_of
from benchmarks.harness.driver import Response, start_driver
from benchmarks.harness.engine import Engine, Request
from benchmarks.harness.process import begun
from benchmarks.probes import SeenTree
from benchmarks.prompts import Prompt
from benchmarks.smollm2.install import pair as real_pair
from benchmarks.smollm2.target import CannotFetch

# Nodes of a tree, query tokens of a step, and the cache: small, for a machine with little memory.
NODES, _ROWS, _KV_CACHE_BYTES = 31, 48, 256 << 20
CHAIN = 3  # the fastest length of vLLM's own chain
_TOKENS, _WARM_UP_TOKENS = 128, 24
_ASKED = {
    "code": "Write a Python function that returns the most frequent word of a text.",
    "arithmetic": "A baker sells 14 loaves in the morning and 9 in the afternoon, each for 4 "
    "dollars. How much does she earn in 5 days? Think step by step.",
    "prose": "Why is the sky blue?",
}


def requests_of(folder: Path) -> list[Request]:
    """The questions in the target's chat template."""
    renderer = Renderer(AutoTokenizer.from_pretrained(folder / "target"), raw=False, limit=1024)
    asked = ((name, renderer.ids(Prompt(name, name, (text,)), [])) for name, text in _ASKED.items())
    return [Request(name, ids, _TOKENS, params={"ignore_eos": False}) for name, ids in asked]


def engine_of(name: str, folder: Path, dtype: str) -> Engine:
    """An engine of `benchmarks.e2e`, but eager, with a batch of one and little memory."""
    target = str(folder / "target")
    words = {"dflash": f"dflash {CHAIN}", "bastion": f"bastion nodes={NODES}"}.get(name, name)
    engine = method_of(words, Target(target, str(folder / "drafter"))).engine(
        target, cpu=False, dtype=dtype, eager=True, max_num_seqs=1,
        max_num_batched_tokens=_ROWS, kv_cache_bytes=_KV_CACHE_BYTES,
        probe="benchmarks.probes:trees" if name == "bastion" else None,
    )  # fmt: skip
    return replace(engine, environment={**engine.environment, "HF_HUB_OFFLINE": "1"})


def decode(
    names: Sequence[str], folder: Path, dtype: str, requests: Sequence[Request],
    shown_by: Tokenizer | None = None,
) -> Iterator[tuple[str, list[Response], list[SeenTree]]]:  # fmt: skip
    """Start engines and yield of each its name, its responses, and the trees that it verified.

    They import vLLM and read their models side by side, then decode one after another. `shown_by`
    prints replies as they are emitted.
    """
    print(f"Starting {' and '.join(names)} in {dtype}", flush=True)
    engines = {name: engine_of(name, folder, dtype) for name in names}
    with ExitStack() as stack:
        started = {name: stack.enter_context(begun(engines[name])) for name in names}
        for name, process in started.items():
            process.answer()
            process.start(start_driver, engines[name])
        for process in started.values():
            process.answer()
        for name, process in started.items():
            process.call("drive", [replace(requests[0], max_tokens=_WARM_UP_TOKENS)], 1)
            process.answer()
            process.call("drive", list(requests), 1, math.inf, shown_by is not None)
            if shown_by is None:
                run = process.answer()
            else:
                shown = pages.Streamed(shown_by, name, list(_ASKED), list(_ASKED.values()))
                run = process.answer(items=shown)
                shown.end()
            trees: list[SeenTree] = []
            if name == "bastion":
                process.call("probed")
                trees = process.answer()
            process.close()  # free its memory before the next engine decodes
            yield name, run, trees


def main(argv: Sequence[str] | None = None) -> int:
    parser_of(benchmarks.demo.__doc__).parse_args(argv)
    try:
        folder = real_pair()
    except CannotFetch as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(pages.title("Three questions, three engines: vLLM on this CPU, SmolLM2-135M-Instruct"))
    busy = psutil.cpu_percent(interval=1.0)
    if busy >= 25:
        print(f"Other processes use {busy:.0f}% of this machine: this run's seconds mean nothing.")
    tokenizer = Tokenizer.from_file(str(folder / "target" / "tokenizer.json"))
    requests, runs, seen = requests_of(folder), dict[str, list[Response]](), list[SeenTree]()
    # bastion times its steps while it starts, so nothing else runs then.
    for names in (("plain", "dflash"), ("bastion",)):
        for name, run, trees in decode(names, folder, "bfloat16", requests, tokenizer):
            runs[name] = run
            seen += trees
    exact = {
        name: run[0].token_ids
        for name, run, _ in decode(("plain", "bastion"), folder, "float32", requests[:1])
    }
    pages.print_same(requests[0].name, tokenizer, exact)
    pages.print_numbers(list(_ASKED), runs)
    pages.print_notes(NODES, CHAIN)
    pages.print_tree(tokenizer, list(_ASKED), seen)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
