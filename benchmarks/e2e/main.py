# SPDX-License-Identifier: Apache-2.0
"""The command: arguments, prompts and engines."""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

import benchmarks.e2e
from benchmarks import TINY, parser_of
from benchmarks.chat import Renderer
from benchmarks.e2e.data import SETS, load_set
from benchmarks.e2e.judge import judge
from benchmarks.e2e.methods import (
    PLAIN,
    REFERENCE,
    Method,
    Target,
    config_of,
    drafts_of,
    fitting,
    gpu_share,
    method_of,
    paper_methods,
)
from benchmarks.e2e.report import page
from benchmarks.e2e.rounds import Plan, Runner
from benchmarks.e2e.store import Round, Store, StoreError, read_rows
from benchmarks.harness.engine import Engine
from benchmarks.pairs import REAL, pair_dtype, pair_folder
from benchmarks.prompts import DataError, Prompt, load_jsonl
from benchmarks.provenance import command_line, device_name, provenance

# Slots of a context beyond prompts and replies; lengths are rounded up, because vLLM compiles again
# for each.
_ROOM, _LENGTH_STEP = 32, 256


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        args = parse(given)
        if args.report:
            print("\n".join(page(read_rows(path)) for path in args.report))
        else:
            print(page(run(args, given).rows))
    except (DataError, StoreError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = parser_of(benchmarks.e2e.__doc__)
    add = parser.add_argument
    add("--pair", help=f"tiny, hybrid, {REAL}, or a shape of benchmarks.widen")
    add("--target", help="in place of a pair: a model of the Hub, or a folder")
    add("--drafter", help="its drafter")
    add("--eagle3", help="its EAGLE-3 head")
    add("--methods", nargs="+", default=[], help="plain always (default: dflash and bastion)")
    add("--against", type=Path, metavar="FOLDER", help="another checkout")
    add("--paper", action="store_true", help="the paper's methods, sets, lengths, T=0 and T=1")
    add("--sets", nargs="+", default=[], metavar="SET", help=f"of {', '.join(SETS)}")
    add("--data", nargs="+", default=[], metavar="SET=FILE", help="local copies of sets")
    add("--jsonl", nargs="+", type=Path, default=[], help="own prompts; Spec-Bench, SPEED-Bench")
    add("--samples", type=int, help="prompts per set (default: 16; with --paper the paper's)")
    add("--tokens", type=int, help="most new tokens (default: 64; with --paper 2048)")
    add("--temperatures", nargs="+", type=float, help="default: 0")
    add("--concurrency", nargs="+", type=int, default=[1])
    add("--round", type=int, help="prompts of a round (default: 4 times the concurrency)")
    add("--passes", type=int, default=1, help="over all prompts")
    add("--starts", type=int, default=1, help="of all engines, each with --passes")
    add("--seconds", type=float, default=math.inf, help="at most, of a set at a concurrency")
    add("--alive", type=int, help="engines side by side (default: a CPU's memory full; GPU: 1)")
    add("--seed", type=int, default=0)
    add("--dtype", help="default: bfloat16; float32 for the tiny pair")
    add("--eager", action="store_true", help="without torch.compile and CUDA graphs")
    add("--cudagraphs", metavar="MODE", help="vLLM's cudagraph_mode, such as FULL_DECODE_ONLY")
    add("--rows", type=int, help="vLLM's max_num_batched_tokens")
    add("--raw", action="store_true", help="no chat template (toy pairs: always)")
    add("--ignore-eos", action="store_true", help="always decode --tokens (toy pairs: always)")
    add("--max-model-len", type=int, help="default: what prompts need and the model has")
    add("--out", type=Path, help="the JSONL file (default: none)")
    add("--report", nargs="+", type=Path, metavar="FILE", help="print the pages of files, no more")
    given = parser.parse_args(argv)
    if not given.report and (given.pair is None) == (given.target is None):
        parser.error("name --target and --drafter, or --pair")
    if unknown := [name for name in given.sets if name not in SETS]:
        parser.error(f"no set {unknown[0]}: choose from {', '.join(SETS)}")
    for pair in given.data:
        if pair.partition("=")[0] not in SETS or "=" not in pair:
            parser.error(f"--data needs SET=FILE, not {pair!r}")
    given.tokens = given.tokens or (2048 if given.paper else 64)
    given.temperatures = given.temperatures or ([0.0, 1.0] if given.paper else [0.0])
    if given.samples is None and not given.paper:
        given.samples = 16
    return given


def run(given: argparse.Namespace, argv: Sequence[str], *, judged: bool = True) -> Store:
    """Decode what is missing, judge differences, and write the page beside the file."""
    cpu = not torch.cuda.is_available()
    what = target_of(given)
    prompts, gaps = _prompts(given)
    tokenizer: Any = AutoTokenizer.from_pretrained(what.target)
    depth = drafts_of(what.drafter)[0] + 1 if what.drafter else _ROOM
    longest = given.max_model_len or _length(what, prompts, tokenizer, given.tokens, depth)
    renderer = Renderer(tokenizer, given.raw, longest - given.tokens - depth)
    alive = given.alive or (fitting(what, longest) if cpu else 1)
    methods = _methods(given, what, cpu)

    def engine(method: Method, concurrency: int) -> Engine:
        own = {name: getattr(given, name) for name in ("dtype", "eager", "cudagraphs")}
        own |= {"max_num_seqs": concurrency, "max_model_len": longest}
        if alive > 1 and not cpu:
            own |= gpu_share(what, alive, concurrency, longest)
        return method.engine(what.target, cpu=cpu, max_num_batched_tokens=given.rows, **own)

    plan = Plan(
        methods, prompts, given.temperatures, given.concurrency, given.tokens, given.seed,
        given.ignore_eos, given.round, given.passes, given.starts, alive,
        seconds=given.seconds,
    )  # fmt: skip
    source = provenance(command_line("benchmarks.e2e", argv)) | {"device": device_name(cpu)}
    header = {"provenance": source, "name": given.pair or Path(what.target).name}
    store = Store(given.out, _settings(given) | {"alive": alive}, header)
    store.append(*({"kind": "gap", "set": name, "reason": why} for name, why in gaps.items()))
    runner = Runner(plan, store, renderer, engine)
    runner.run()
    by_id = {(one.set, one.id): one for one in prompts}

    def prompt_and_reply(this: Round, name: str) -> tuple[list[int], list[int]]:
        return runner.prompt_and_reply(this, by_id[this.set, name])

    if judged:
        judge(store, engine(methods[PLAIN], 1), prompt_and_reply, given.dtype)
    if given.out is not None:
        given.out.with_suffix(".md").write_text(page(store.rows) + "\n")
    return store


def target_of(given: argparse.Namespace) -> Target:
    """The target; fills in what a pair of ours implies. Raises DataError: it cannot be had."""
    given.dtype = given.dtype or (pair_dtype(given.pair) if given.pair else "bfloat16")
    if given.pair is None:
        return Target(given.target, given.drafter, given.eagle3)
    folder = pair_folder(given.pair)
    given.sets = given.sets or [one.partition("=")[0] for one in given.data]
    if given.pair != REAL:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        given.raw = given.ignore_eos = True
        given.jsonl = given.jsonl or ([] if given.sets else [TINY / "prompts.jsonl"])
    head = given.eagle3 or (str(TINY / "eagle3") if given.pair == "tiny" else None)
    drafter = given.drafter or "drafter"
    return Target(str(folder / "target"), str(folder / drafter), head)


def _methods(given: argparse.Namespace, what: Target, cpu: bool) -> dict[str, Method]:
    usual = ["dflash", "bastion"] if what.drafter else ["ngram"]
    words = given.methods or (paper_methods(what, cpu=cpu) if given.paper else usual)
    found = [method_of(one, what) for one in dict.fromkeys([PLAIN, *words])]
    if cpu and max(given.temperatures) > 0 and any(one.ours for one in found):
        found.insert(1, method_of(REFERENCE, what))
    if given.against is not None:
        if not (given.against / "vllm_bastion").is_dir():
            raise DataError(f"{given.against} is no checkout of vllm-bastion")
        label = _commit(given.against)
        beside = [
            [one, one.elsewhere(given.against, label)] if one.ours else [one] for one in found
        ]
        found = [one for own in beside for one in own]
    return {one.name: one for one in found}


def _commit(folder: Path) -> str:
    command = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or folder.resolve().name


def _prompts(given: argparse.Namespace) -> tuple[list[Prompt], dict[str, str]]:
    """All prompts, and why a set could not be had."""
    local = {name: Path(file) for name, _, file in (one.partition("=") for one in given.data)}
    names = given.sets or ([] if given.jsonl else list(SETS))
    found: list[Prompt] = []
    gaps: dict[str, str] = {}
    for name in names:
        try:
            found += load_set(name, given.samples, given.seed, local.get(name))
        except DataError as error:
            gaps[name] = str(error)
            print(error, file=sys.stderr)
    for path in given.jsonl:
        found += load_jsonl(path, given.samples)
    if not found:
        raise DataError("no set could be had, so there is nothing to decode")
    return found, gaps


def _settings(given: argparse.Namespace) -> dict[str, Any]:
    """What is written beside the rounds; folders only by name."""
    keys = ("tokens", "seed", "dtype", "raw", "ignore_eos", "round", "samples", "eager")
    own = {name: getattr(given, name) for name in keys}
    own["target"] = given.pair or Path(given.target).name
    own["drafter"] = Path(given.drafter).name if given.drafter else given.pair
    own["omp_num_threads"] = os.environ.get("OMP_NUM_THREADS")
    return own | {"load": os.getloadavg()[0]}


def _length(
    what: Target, prompts: Sequence[Prompt], tokenizer: Any, tokens: int, depth: int
) -> int:
    """Room for the longest conversation, at most the model's own limit."""
    most = max(
        sum(len(tokenizer(turn)["input_ids"]) + _ROOM + tokens for turn in prompt.turns)
        for prompt in prompts
    )
    most = -(-(most + depth + _ROOM) // _LENGTH_STEP) * _LENGTH_STEP
    return int(min(config_of(what.target).get("max_position_embeddings") or most, most))
