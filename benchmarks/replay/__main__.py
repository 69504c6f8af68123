# SPDX-License-Identifier: Apache-2.0
"""Evaluate budget policies on a recording with any cost table, without a model.

    python -m benchmarks.replay RECORDING.npz [--cost NAME=PROFILE.json ...]

Prints a page of tables. The paper's A100 points and a calculated mixture of experts are always
among the cost tables. `--cost` adds measured step costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import parser_of
from benchmarks.replay.costs import CostSource, from_profile, mixture_of_experts, paper_a100
from benchmarks.replay.recording import load_recording
from benchmarks.replay.simulation import Corpus
from benchmarks.replay.studies import change_study, gate_study

_TITLES = {
    gate_study: "Where steps really cost something else, as a share of the best choice",
    change_study: "Where costs change in the middle, as a share of the best choice of each half",
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("recording", type=Path)
    parser.add_argument("--cost", action="append", default=[], metavar="NAME=PROFILE.json")
    parser.add_argument("--max-nodes", type=int, default=255)
    parser.add_argument("--seeds", type=int, default=1, help="of noise and stalls (default 1)")
    given = parser.parse_args(argv)
    max_rows = 16 * (given.max_nodes + 1)
    sources = [paper_a100(max_rows), mixture_of_experts(max_rows)]
    for pair in given.cost:
        name, _, path = pair.partition("=")
        if not path:
            parser.error(f"--cost needs NAME=PROFILE.json, not {pair!r}")
        sources.append(from_profile(name, Path(path), max_rows))
    recording = load_recording(given.recording)
    for temperature in sorted(set(recording.temperatures.tolist())):
        corpus = Corpus(recording, given.max_nodes, temperature)
        for source in sources:
            print(f"\n## {given.recording.stem}, T={temperature:g}, cost: {source.name}\n")
            _print_all(corpus, source, range(given.seeds))
    return 0


def _print_all(corpus: Corpus, source: CostSource, seeds: Sequence[int]) -> None:
    for study, title in _TITLES.items():
        rows = study(corpus, source, seeds=seeds)
        print(f"\n{title}\n")
        _print_rows(rows)
        for name in list(rows[0])[3:]:
            shares = [row[name] for row in rows]
            print(f"\n{name}: mean {sum(shares) / len(shares):.3f}, least {min(shares):.3f}")


def _print_rows(rows: Any) -> None:
    for number, row in enumerate(rows):
        if number == 0:
            print("| " + " | ".join(row) + " |")
            print("|" + "---|" * len(row))
        cells = [f"{x:.3f}" if isinstance(x, float) else str(x) for x in row.values()]
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
