# SPDX-License-Identifier: Apache-2.0
"""The command's forms: run, and `report`."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoTokenizer

from benchmarks import RESULTS
from benchmarks.harness.decoder import run_engine
from benchmarks.harness.engine import Request, UserEngine, bastion
from benchmarks.harness.process import EngineError
from benchmarks.paper import report
from benchmarks.paper.arguments import REAL, config_of, parse, target_of
from benchmarks.paper.chat import Renderer
from benchmarks.paper.data import LONG, SHORT, load_set
from benchmarks.paper.judge import judge
from benchmarks.paper.kinds import KINDS
from benchmarks.paper.methods import PLAIN, Target, chosen, engines_of, fitting, methods
from benchmarks.paper.plan import Plan
from benchmarks.paper.replayed import replay
from benchmarks.paper.run import Runner, short_reason
from benchmarks.paper.store import Store, StoreError
from benchmarks.progress import Progress
from benchmarks.prompts import DataError, Prompt, load_jsonl
from benchmarks.provenance import provenance, without_folders
from benchmarks.replay.costs import CostSource, table_of
from benchmarks.replay.record import record

OUT = RESULTS / "paper"
# Tokens of a replayed prompt; a recording of one has 1.5 KB for each.
_REPLAY_TOKENS, _REPLAY_ROWS = 256, 1025
_ROOM = 32
# Lengths are rounded up, because vLLM compiles again for each.
_LENGTH_STEP = 256


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        return report.main(given[1:]) if given[:1] == ["report"] else _run(parse(given), given)
    except (DataError, StoreError) as error:
        print(error, file=sys.stderr)
        return 2


def _prompts(given: argparse.Namespace) -> tuple[list[Prompt], dict[str, str]]:
    """All prompts, and why a set could not be had."""
    local = dict(pair.split("=", 1) for pair in given.data)
    names = given.sets or ([] if given.jsonl else list(SHORT))
    if given.long:
        names += [name for name in LONG if name not in names]
    found: list[Prompt] = []
    gaps: dict[str, str] = {}

    def add(name: str, load: Any) -> None:
        try:
            found.extend(load())
        except DataError as error:
            gaps[name] = str(error)
            print(error, file=sys.stderr)

    for name in names:
        path = Path(local[name]) if name in local else None
        add(name, partial(load_set, name, given.samples, given.seed, path))
    for path in given.jsonl:
        add(path.stem, partial(load_jsonl, path, given.samples))
    if not found:
        raise DataError("no set could be had, so there is nothing to decode")
    if given.kinds:
        found = [
            replace(one, set=f"{one.set}, {kind}", params=KINDS[kind])
            for kind in given.kinds
            for one in found
        ]
    return found, gaps


def _run(given: argparse.Namespace, argv: list[str]) -> int:
    cpu = not torch.cuda.is_available()
    if given.pair not in (None, REAL):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    what = target_of(given)
    rows = methods(what, cpu=cpu, budgets=given.budgets)
    picked = chosen(rows, given.methods, max(given.temperatures) > 0)
    prompts, gaps = _prompts(given)
    tokenizer = AutoTokenizer.from_pretrained(what.target)
    longest = given.max_model_len or _length(what, prompts, tokenizer, given)
    renderer = Renderer(tokenizer, given.raw, longest - given.tokens - what.gamma - 1)

    alive = given.alive or (fitting(what, longest) if cpu else 1)
    settings = {name: getattr(given, name) for name in ("dtype", "eager", "cudagraphs")}
    engine = engines_of(what, cpu, alive, max_model_len=longest, **settings)
    name = given.pair or Path(what.target).name
    out = given.out or OUT / f"{name}{'-quick' if given.quick else ''}.jsonl"
    device = _cpu_name() if cpu else torch.cuda.get_device_name()
    header = {"provenance": provenance(without_folders(argv)) | {"device": device}, "name": name}
    order = given.temperatures, given.concurrency
    plan = Plan(picked, prompts, *order, given.tokens, given.seed, given.ignore_eos, alive)
    with Store(out, _settings(given, what) | {"alive": alive}, header) as store:
        for gap, reason in gaps.items():
            store.append({"kind": "gap", "set": gap, "reason": reason})
        runner = Runner(plan, store, renderer, engine)
        runner.run()
        judge(store, engine(picked[PLAIN], 1), runner.prompt_and_reply, given.dtype)
        if what.drafter is not None and given.replay_prompts:
            _replay(store, plan, renderer, engine(rows["bastion adaptive"], 1), what, given)
    return report.write([out], out.parent, out.stem)


def _cpu_name() -> str:
    """A CPU's model and number of threads, on which every time depends."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    model = models[0] if models else platform.processor() or platform.machine() or "cpu"
    return f"{model} x{torch.get_num_threads()}"


def _settings(given: argparse.Namespace, what: Target) -> dict[str, Any]:
    """What is written beside the responses; folders only by name."""
    folders = ("target", "drafter", "eagle3")
    own = {
        name: value and Path(value).name for name, value in vars(what).items() if name in folders
    }
    if given.pair is not None:
        own |= {"target": given.pair, "drafter": given.pair}
    keys = ("tokens", "seed", "dtype", "raw", "ignore_eos", "temperatures", "concurrency")
    own |= {name: getattr(given, name) for name in (*keys, "samples", "eager")}
    own["omp_num_threads"] = os.environ.get("OMP_NUM_THREADS")
    own["load"] = os.getloadavg()[0]
    return own


def _length(
    what: Target, prompts: Sequence[Prompt], tokenizer: Any, given: argparse.Namespace
) -> int:
    """Room for the longest conversation, at most the model's own limit."""
    most = 0
    for prompt in prompts:
        asked = sum(len(tokenizer(turn)["input_ids"]) + _ROOM for turn in prompt.turns)
        most = max(most, asked + len(prompt.turns) * given.tokens)
    most += what.gamma + _ROOM
    limit = getattr(config_of(what.target), "max_position_embeddings", None) or most
    return int(min(limit, -(-most // _LENGTH_STEP) * _LENGTH_STEP))


def _replay(
    store: Store,
    plan: Plan,
    renderer: Renderer,
    engine: UserEngine,
    what: Target,
    given: argparse.Namespace,
) -> None:
    """Record drafts and replay beam search on them, unless the file has it."""
    done = {row["temperature"] for row in store.of_kind("replayed")}
    missing = [t for t in plan.temperatures if t not in done]
    if not missing:
        return
    requests = {}
    length = min(given.tokens, _REPLAY_TOKENS) + what.gamma + 1
    for temperature in missing:
        for prompt in plan.prompts:
            seed = plan.seeds()[prompt.set, prompt.id]
            if seed - plan.seed < given.replay_prompts:
                name = f"{prompt.set}/{prompt.id}/T{temperature:g}"
                ids = renderer.ids(prompt, [])
                requests[name] = Request(name, ids, length, temperature, seed), prompt.set
    progress = Progress("recording drafts")
    drafter = Path(what.drafter)
    try:
        measuring = replace(
            engine,
            speculative=bastion(drafter, 4 * what.gamma, "adaptive"),
            probe="benchmarks.replay.costs:measured",
        )
        numbers, calibrated = run_engine(measuring, []).probed
        table = table_of(numbers, _REPLAY_ROWS, calibrated)
        source = CostSource("this machine", table, calibrated)
        recording = record(engine, drafter, requests, progress, {})
        store.append(*replay(recording, source, missing))
        progress.done(f"{recording.num_steps} steps")
    except EngineError as error:
        reason = short_reason(str(error))
        store.append({"kind": "gap", "method": "beam search (replayed)", "reason": reason})
        tqdm.write(f"beam search (replayed): {reason}", file=sys.stderr)
