# SPDX-License-Identifier: Apache-2.0
"""Start the demo's engines, decode, print."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import benchmarks.demo
from benchmarks.demo.pages import print_completion, print_numbers, print_tree, title
from benchmarks.demo.pair import SHAPE, CannotWrite, Pair, pair_of, tiny_pair
from benchmarks.engine import (
    IMPORTED,
    STARTED,
    TINY,
    Engine,
    Request,
    Run,
    bastion,
    load_prompts,
)
from benchmarks.progress import Progress
from benchmarks.running import RunningEngine
from benchmarks.speed.methods import ADAPTIVE, PLAIN, chain_name, engines

PROMPTS = ("code-made-05", "arithmetic-15", "chat-20")
TOKENS = 48
# Small, because a start times steps up to these sizes: trees, rows of a step, and the cache.
NODES, _ROWS, _KV_CACHE_BYTES = 31, 48, 256 << 20


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=benchmarks.demo.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", nargs="+", default=PROMPTS, help="ids in prompts.jsonl")
    parser.add_argument(
        "--pair", default=SHAPE, help=f"{SHAPE}, tiny, or a folder of target and drafter"
    )
    given = parser.parse_args(argv)
    if given.pair not in (SHAPE, "tiny") and not Path(given.pair, "target").is_dir():
        parser.error(f"{given.pair} is no folder with a target and a drafter")
    rows = {row["id"]: row for row in load_prompts(TINY / "prompts.jsonl")}
    prompts = [rows[name] for name in given.prompts]
    pair = pair_of(given.pair)
    print(title(f"Three prompts, three engines: vLLM on this CPU with {pair.name}"), flush=True)
    requests = [Request(row["id"], row["prompt"], TOKENS) for row in prompts]
    try:
        runs = decode(pair, requests)
    except CannotWrite as error:
        pair = tiny_pair(str(error))
        runs = decode(pair, requests)
    for index, row in enumerate(prompts):
        print_completion(row, {name: run.completions[index] for name, run in runs.items()})
    print_numbers(pair, NODES, prompts, runs)
    print_tree(pair.folder / "target", prompts, runs["bastion"].probed)
    return 0


def decode(pair: Pair, requests: list[Request]) -> dict[str, Run]:
    """Each engine in its own process, and each decodes alone.

    Raises:
        CannotWrite: there is no room for the pair after all.
    """
    runs: dict[str, Run] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        running = {}
        for name, engine in _engines(pair, folder / "costs.json").items():
            running[name] = RunningEngine(engine, requests, hold=(IMPORTED, STARTED))
            stack.callback(running[name].close)
        # While they import vLLM.
        pair.write()
        progress = Progress("engines")
        for engine in running.values():
            engine.wait(IMPORTED, lambda state: progress("importing vLLM"))
        # bastion measures what its steps cost while it starts, so nothing runs beside it.
        for names in (("plain", "dflash"), ("bastion",)):
            progress = Progress(" and ".join(names))
            for name in names:
                running[name].release()
            for name in names:
                running[name].wait(STARTED, progress)
            progress.done(f"started in {progress.seconds:.0f} s")
            for name in names:
                progress = Progress(name)
                running[name].release()
                runs[name] = running[name].result(progress)
                # Its memory is free, and its end takes nobody's time.
                running[name].close()
                progress.done(f"decoded in {runs[name].decode_s:.1f} s")
    return runs


def _engines(pair: Pair, costs: Path) -> dict[str, Engine]:
    """As in the table of seconds, but eager, with one request at a time and little memory."""
    rows = engines(
        pair.folder,
        dtype=pair.dtype,
        eager=True,
        max_num_seqs=1,
        rows=_ROWS,
        kv_cache_bytes=_KV_CACHE_BYTES,
        timed=True,
    )
    trees = bastion(pair.folder / "drafter", NODES, "adaptive", calibration=str(costs))
    chosen = {
        "plain": rows[PLAIN],
        "dflash": rows[chain_name(pair.chain)],
        "bastion": replace(rows[ADAPTIVE], speculative=trees, probe="benchmarks.probes:trees"),
    }
    own = {name: value for name, value in pair.environment.items() if name not in os.environ}
    for name, engine in chosen.items():
        environment = {**engine.environment, **own}
        environment.pop("VLLM_CPU_KVCACHE_SPACE", None)
        chosen[name] = replace(engine, environment=environment)
    return chosen
