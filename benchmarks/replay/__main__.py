# SPDX-License-Identifier: Apache-2.0
"""Evaluate budget policies on a recording with any cost table, without a model.

    python -m benchmarks.replay RECORDING.npz [--cost NAME=PROFILE.json ...]

Prints a page of tables. The paper's A100 points and a calculated mixture of experts are always
among the cost tables. `--cost` adds a measured latency profile.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import parser_of
from benchmarks.replay.costs import CostSource, from_profile, mixture_of_experts, paper_a100
from benchmarks.replay.recording import load_recording
from benchmarks.replay.simulation import Corpus
from benchmarks.replay.studies import (
    BATCH_NODES,
    BATCHES,
    batch_study,
    budget_study,
    gate_study,
    lookup_study,
    score_study,
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("recording", type=Path, nargs="+")
    parser.add_argument("--cost", action="append", default=[], metavar="NAME=PROFILE.json")
    parser.add_argument("--max-nodes", type=int, default=1024)
    arguments = parser.parse_args(argv)
    max_rows = max(arguments.max_nodes + 1, max(BATCHES) * (BATCH_NODES + 1))
    sources = [paper_a100(max_rows), mixture_of_experts(max_rows)]
    for pair in arguments.cost:
        name, _, path = pair.partition("=")
        if not path:
            parser.error(f"--cost needs NAME=PROFILE.json, not {pair!r}")
        sources.append(from_profile(name, Path(path), max_rows))
    for path in arguments.recording:
        recording = load_recording(path)
        for temperature in sorted(set(recording.temperatures.tolist())):
            corpus = Corpus(recording, arguments.max_nodes, temperature)
            for source in sources:
                print(f"\n## {path.stem}, T={temperature:g}, cost: {source.name}\n")
                _print_studies(corpus, source)
    return 0


def _print_studies(corpus: Corpus, source: CostSource) -> None:
    _print_budgets(budget_study(corpus, source))
    tables = {
        "A-hat against the accepted length": [score_study(corpus, source)],
        "The gate, as a share of the better of plain decoding and the best fixed budget": (
            gate_study(corpus, source)
        ),
        "Batches, speed-up over plain decoding at the same batch": batch_study(corpus, source),
        "Lookup, speed-up over plain decoding at the same batch": lookup_study(corpus, source),
    }
    for title, rows in tables.items():
        print(f"\n{title}\n")
        _print_rows(rows)


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


if __name__ == "__main__":
    raise SystemExit(main())
