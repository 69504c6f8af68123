# SPDX-License-Identifier: Apache-2.0
"""Evaluate budget policies on a recording with any cost table, without a model.

    python -m benchmarks.replay RECORDING.npz [--cost NAME=PROFILE.json ...] [--out FOLDER]

Prints the tables and writes them to `replay.json`, with two PNG figures per cost table. The paper's
A100 points and a calculated mixture of experts are always among the cost tables. `--cost` adds a
measured latency profile.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.replay.costs import CostSource, from_profile, mixture_of_experts, paper_a100
from benchmarks.replay.figures import sweep_figure, tradeoff_figure
from benchmarks.replay.gate_study import FIRST, gate_study, start_study
from benchmarks.replay.recording import load_recording
from benchmarks.replay.simulation import Corpus
from benchmarks.replay.studies import (
    BATCH_NODES,
    BATCHES,
    batch_study,
    budget_study,
    compare_scores,
    drift_study,
    score_study,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recording", type=Path, nargs="+")
    parser.add_argument("--cost", action="append", default=[], metavar="NAME=PROFILE.json")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/replay"))
    parser.add_argument("--max-nodes", type=int, default=1024)
    parser.add_argument("--no-figures", action="store_true", help="skip the PNGs")
    arguments = parser.parse_args(argv)
    max_rows = max(arguments.max_nodes + 1, max(BATCHES) * (BATCH_NODES + 1))
    sources = [paper_a100(max_rows), mixture_of_experts(max_rows)]
    for pair in arguments.cost:
        name, _, path = pair.partition("=")
        if not path:
            parser.error(f"--cost needs NAME=PROFILE.json, not {pair!r}")
        sources.append(from_profile(name, Path(path), max_rows))
    arguments.out.mkdir(parents=True, exist_ok=True)
    report = []
    for path in arguments.recording:
        recording = load_recording(path)
        for temperature in sorted(set(recording.temperatures.tolist())):
            corpus = Corpus(recording, arguments.max_nodes, temperature)
            label = f"{path.stem}, T={temperature:g}"
            entry = {
                "recording": path.name,
                "meta": recording.meta,
                "temperature": temperature,
                "requests": len(corpus.requests),
                "positions": sum(request.last for request in corpus.requests),
            }
            figures = None if arguments.no_figures else arguments.out
            if corpus.unary:
                entry["costs"] = _evaluate(corpus, sources, label, figures)
            else:
                unary = Corpus(recording, arguments.max_nodes, temperature, unary=True)
                by_scores = {"transitions": corpus, "unary": unary}
                entry["costs"] = _compare(by_scores, sources, label)
            report.append(entry)
    (arguments.out / "replay.json").write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _evaluate(
    corpus: Corpus, sources: list[CostSource], label: str, figures: Path | None
) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for source in sources:
        start = time.perf_counter()
        print(f"\n## {label}, cost: {source.name}\n")
        study = budget_study(corpus, source)
        _print_budgets(study)
        scores = score_study(corpus, source)
        print("\nA-hat against the accepted length\n")
        _print_rows([scores])
        drift = drift_study(corpus, source)
        print("\nEstimators, speed as a share of a controller that knows the slowdown\n")
        _print_rows(drift)
        gates = gate_study(corpus, source)
        print("\nThe gate, as a share of the better of plain decoding and the best fixed budget\n")
        _print_rows(gates)
        hard = gate_study(corpus, source, hard_start=True)
        print("\nThe same after a hard start: the requests that accept least come first\n")
        _print_rows(hard)
        starts = start_study(corpus, source)
        print(
            f"\nThe first {FIRST} requests after a start, time over that of the same ones later\n"
        )
        _print_rows(starts)
        batches = batch_study(corpus, source)
        print("\nBatches, speed-up over plain decoding at the same batch\n")
        _print_rows(batches)
        out[source.name] = {
            "budgets": study,
            "scores": scores,
            "drift": drift,
            "gate": gates,
            "gate after a hard start": hard,
            "start": starts,
            "batches": batches,
            "seconds": time.perf_counter() - start,
        }
        if figures is not None:
            stem = _slug(f"{label}-{source.name}")
            tradeoff_figure(corpus, source, study, figures / f"tradeoff-{stem}.png")
    if figures is not None:
        studies = {name: result["budgets"] for name, result in out.items()}
        sweep_figure(studies, figures / f"sweep-{_slug(label)}.png")
    return out


def _compare(
    corpora: dict[str, Corpus], sources: list[CostSource], label: str
) -> dict[str, dict[str, Any]]:
    """Compare trees over different scores of the same steps: budgets and A-hat."""
    out: dict[str, dict[str, Any]] = {}
    for source in sources:
        studies = {}
        for scores, corpus in corpora.items():
            print(f"\n## {label}, {scores} scores, cost: {source.name}\n")
            study = budget_study(corpus, source)
            _print_budgets(study)
            studies[scores] = {"budgets": study, "scores": score_study(corpus, source)}
        print(f"\n## {label}, scores compared, cost: {source.name}\n")
        _print_rows(compare_scores({name: s["budgets"] for name, s in studies.items()}))
        print("\nA-hat against the accepted length\n")
        _print_rows([{"scores": name, **study["scores"]} for name, study in studies.items()])
        out[source.name] = studies
    return out


def _print_budgets(study: dict[str, Any]) -> None:
    columns = [*study["domains"], "average"]
    print("| policy | " + " | ".join(f"{c}: speed-up, tau, N" for c in columns) + " |")
    print("|---|" + "---|" * len(columns))
    for name, row in study["rows"].items():
        cells = [
            f"{row[c]['speedup']:.2f}x, {row[c]['tau']:.2f}, {row[c]['nodes']:.0f}" for c in columns
        ]
        print(f"| {name} | " + " | ".join(cells) + " |")
    print()
    for name, value in study["summary"].items():
        print(f"- {name}: {value:.3f}" if isinstance(value, float) else f"- {name}: {value}")


def _print_rows(rows: Sequence[dict[str, Any]]) -> None:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))
    for row in rows:
        print("| " + " | ".join(_cell(row.get(c, "")) for c in columns) + " |")


def _cell(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float | np.floating) else str(value)


def _slug(text: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in text.lower()).strip("-").replace("--", "-")


if __name__ == "__main__":
    raise SystemExit(main())
