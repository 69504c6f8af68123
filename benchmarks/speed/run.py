# SPDX-License-Identifier: Apache-2.0
"""Drive every method over every cell, and write the results after each drive."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch

import benchmarks.speed
from benchmarks import RESULTS, TINY
from benchmarks.harness.decoder import IMPORTS
from benchmarks.harness.engine import Request
from benchmarks.harness.process import EngineError, EngineProcess
from benchmarks.kinds import KINDS, PLAINEST
from benchmarks.progress import Progress
from benchmarks.prompts import DOMAINS, load_prompts
from benchmarks.provenance import provenance
from benchmarks.speed import report
from benchmarks.speed.driver import Outcome, rmse, start_driver
from benchmarks.speed.figures import budgets_of, sweep_figure, tradeoff_figure
from benchmarks.speed.methods import ADAPTIVE, PLAIN, SpeedEngine, engines, groups
from vllm_bastion.drafter_kinds import architectures_of, kind_of
from vllm_bastion.policy.cost.devices import device_name

_WARM_UP_TOKENS = 24
# Of `--quick`.
_QUICK = {
    "prompts": 2,
    "tokens": 32,
    "repeats": 2,
    "concurrency": [1, 4],
    "temperatures": [0.0],
    "only": [PLAIN, "dflash 7", "dflash 15", "N=16", "N=32", ADAPTIVE],
}
# Memory of an engine besides its weights: libraries, compiled code, the KV cache.
_OVERHEAD_BYTES = 5 << 28


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    given = _arguments(argv)
    if given.pair == "tiny":
        pair = TINY
    elif Path(given.pair).is_dir():
        pair = Path(given.pair)
    else:
        from benchmarks.widen.pairs import pair_of

        pair = pair_of(given.pair)
    methods = engines(
        pair,
        {folder: _method_of(folder) for folder in given.drafters},
        dtype=given.dtype or ("float32" if given.pair == "tiny" else "bfloat16"),
        eager=given.eager,
        max_num_batched_tokens=given.rows,
        max_num_seqs=max(given.concurrency),
    )
    chosen = [
        name
        for name in methods
        if name == PLAIN or not given.only or any(part in name for part in given.only)
    ]
    at_a_time = given.alive or _fitting(pair)
    shape = Path(given.pair).name
    stems = {kind: f"speed-{shape}-{kind.split()[0].lower()}" for kind in given.kinds}
    stems = {kind: f"speed-{shape}" if kind == PLAINEST else stem for kind, stem in stems.items()}
    options = {name: value for name, value in vars(given).items() if name not in ("out", "pair")}
    options["drafters"] = [folder.name for folder in given.drafters]
    device = device_name("cuda" if torch.cuda.is_available() else "cpu")
    result: dict[str, Any] = {
        "provenance": provenance(argv) | {"device": device},
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        # Load average before anything ran; 0 on an idle machine.
        "load": os.getloadavg()[0],
        "settings": {**options, "pair": shape, "alive": at_a_time},
        "complete": False,
        "failed": {},
        "start_s": {},
        "runs": [],
    }
    adaptive: dict[str, list[Outcome]] = {kind: [] for kind in stems}

    def runs_with(kind: str) -> list[dict[str, Any]]:
        return [run for run in result["runs"] if run["kind"] == kind]

    def write(kind: str) -> None:
        table, timed = report.tabulate(runs_with(kind)), adaptive[kind]
        errors = rmse(timed) if any(outcome.timed_steps for outcome in timed) else {}
        own = {"runs": runs_with(kind), "rmse_ms": errors, "summary": report.summary(table)}
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / f"{stems[kind]}.json").write_text(json.dumps(result | own, indent=1) + "\n")
        title = f"Speed of the {shape} pair" + ("" if kind == PLAINEST else f", {kind}")
        page = report.markdown(table, errors, result["provenance"]["command"], title)
        (given.out / f"{stems[kind]}.md").write_text(page)

    for number, group in enumerate(groups(chosen, at_a_time)):
        for run, outcome in _run_group(number, group, methods, given, result):
            result["runs"].append(run)
            if run["engine"] == ADAPTIVE:
                adaptive[run["kind"]].append(outcome)
            write(run["kind"])
    result["complete"] = True
    for kind, stem in stems.items():
        write(kind)
        _draw(report.tabulate(runs_with(kind)), given.out, stem)
        print((given.out / f"{stem}.md").read_text())
    for name, reason in result["failed"].items():
        print(f"{name} failed: {reason}")
    return 1 if result["failed"] else 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=benchmarks.speed.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--pair", default="tiny", help="tiny, a shape of benchmarks.widen, or a folder")
    add("--drafters", nargs="+", type=Path, default=[], help="folders of other drafters, as rows")
    add("--quick", action="store_true", help="few prompts, methods and repeats")
    add("--only", nargs="+", default=[], help="methods whose name has one of these, and plain")
    add("--domains", nargs="+", default=list(DOMAINS), choices=DOMAINS)
    add("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    add("--concurrency", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    add("--prompts", type=int, default=30, help="per domain (default 30)")
    add("--kinds", nargs="+", default=[PLAINEST], choices=KINDS, help="what requests ask for")
    add("--tokens", type=int, default=64, help="new tokens (default 64)")
    add("--repeats", type=int, default=3)
    add("--alive", type=int, help="engines started side by side (default: as many as fit)")
    add("--dtype", help="default: float32 for the tiny pair, else bfloat16")
    add("--eager", action="store_true", help="without torch.compile")
    add("--rows", type=int, help="max_num_batched_tokens (default: vLLM's)")
    add("--out", type=Path, default=RESULTS / "speed")
    given = parser.parse_args(argv)
    if given.quick:
        # Options that were given win.
        for name, value in _QUICK.items():
            if getattr(given, name) == parser.get_default(name):
                setattr(given, name, value)
    return given


def _method_of(folder: Path) -> str:
    config = SimpleNamespace(**json.loads((folder / "config.json").read_text()))
    kind = kind_of(architectures_of(config))
    if kind is None:
        raise SystemExit(f"{folder} has no drafter that method bastion supports")
    return kind.method


def _fitting(pair: Path) -> int:
    weights = sum(path.stat().st_size for path in pair.glob("*/*.safetensors"))
    return max(2, int(psutil.virtual_memory().available * 0.9 / (2.2 * weights + _OVERHEAD_BYTES)))


def _run_group(
    number: int,
    group: list[str],
    methods: dict[str, SpeedEngine],
    given: argparse.Namespace,
    result: dict[str, Any],
) -> Iterator[tuple[report.Run, Outcome]]:
    """Start a group's engines and drive them in turn; yields after every drive."""
    prompts = load_prompts(TINY / "prompts.jsonl", given.prompts)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bastion-")))
        alive: dict[str, EngineProcess] = {}
        for name in group:
            progress = Progress(name)
            log, variables = folder / f"{len(alive)}.log", methods[name].variables()
            process = EngineProcess(log, variables, IMPORTS)
            stack.callback(process.close)
            try:
                process.answer(progress)
                process.start(start_driver, methods[name])
                start_s = process.answer(progress)
            except EngineError as error:
                result["failed"][name] = str(error)
                continue
            process.pause()
            alive[name] = process
            result["start_s"][f"{name}, group {number}"] = round(start_s, 1)
            progress.done(f"started in {start_s:.0f} s")

        def drive(name: str, requests: list[Request], concurrency: int) -> Outcome | None:
            engine = alive[name]
            try:
                engine.resume()
                engine.call("drive", requests, concurrency)
                with Progress(name) as progress:
                    outcome: Outcome = engine.answer(progress)
                engine.pause()
                return outcome
            except EngineError as error:
                result["failed"][name] = str(error)
                alive.pop(name).close()
                return None

        for kind, temperature, concurrency in product(
            given.kinds, given.temperatures, given.concurrency
        ):
            params = KINDS[kind]
            warm_up = _requests(prompts[:concurrency], _WARM_UP_TOKENS, temperature, params)
            for name in list(alive):
                drive(name, warm_up, concurrency)
            truth: dict[str, list[list[int]]] = {}
            for repeat, domain in product(range(given.repeats), given.domains):
                own = [row for row in prompts if row["domain"] == domain]
                requests = _requests(own, given.tokens, temperature, params)
                # In the first repeat plain decoding goes first: its tokens are the reference.
                names = list(alive)
                shift = repeat % max(1, len(names))
                for name in names[shift:] + names[:shift]:
                    outcome = drive(name, requests, concurrency)
                    if outcome is None:
                        continue
                    run = asdict(outcome)
                    ids = run.pop("token_ids")
                    if name == PLAIN:
                        truth[domain] = ids
                    run["same_as_plain"] = sum(map(list.__eq__, ids, truth.get(domain, [])))
                    where = {"engine": name, "group": number, "kind": kind}
                    where["temperature"] = temperature
                    cell = {"concurrency": concurrency, "domain": domain, "repeat": repeat}
                    yield {**where, **cell, "requests": len(ids), **run}, outcome


def _requests(
    rows: list[dict[str, str]], tokens: int, temperature: float, params: dict[str, Any]
) -> list[Request]:
    return [
        Request(row["id"], row["prompt"], tokens, temperature, seed, params)
        for seed, row in enumerate(rows)
    ]


def _draw(table: report.Table, out: Path, stem: str) -> None:
    panels = {}
    for (temperature, concurrency), domains in sorted(table.items()):
        if len(budgets_of(domains)) < 2:
            continue
        title = f"T={temperature:g}, concurrency {concurrency}"
        panels[title] = domains
        name = f"{stem}-tradeoff-t{temperature:g}-c{concurrency}.png"
        tradeoff_figure(domains, title, out / name)
    if panels:
        sweep_figure(panels, out / f"{stem}-sweep.png")
