# SPDX-License-Identifier: Apache-2.0
"""Evaluate budget policies on a recording with any costs, without a model.

    python -m benchmarks.replay RECORDING.npz [--cost NAME=COSTS.json ...]

Prints tables. The paper's A100 points are always among the costs. `--cost` adds measured ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from benchmarks import parser_of
from benchmarks.replay.costs import measured, paper_a100
from benchmarks.replay.recording import load_recording
from benchmarks.replay.simulation import Corpus
from benchmarks.replay.studies import PRODUCT, STUDIES, shares_of_best


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("recording", type=Path)
    parser.add_argument("--cost", action="append", default=[], metavar="NAME=COSTS.json")
    parser.add_argument("--max-nodes", type=int, default=255)
    parser.add_argument("--seeds", type=int, default=1, help="of noise and stalls (default 1)")
    given = parser.parse_args(argv)
    max_rows = 16 * (given.max_nodes + 1)
    costs = {"paper's A100": paper_a100(max_rows)}
    for pair in given.cost:
        name, _, path = pair.partition("=")
        if not path:
            parser.error(f"--cost needs NAME=COSTS.json, not {pair!r}")
        costs[name] = measured(Path(path), max_rows)
    recording = load_recording(given.recording)
    for temperature in sorted(set(recording.temperatures.tolist())):
        corpus = Corpus(recording, given.max_nodes, temperature)
        for name, own in costs.items():
            for study in STUDIES:
                print(f"\n## {given.recording.stem}, T={temperature:g}, {name}: {study}\n")
                rows = shares_of_best(study, corpus, own, seeds=range(given.seeds))
                print(f"| {' | '.join(rows[0])} |\n{'|---' * len(rows[0])}|")
                for row in rows:
                    cells = [f"{x:.3f}" if isinstance(x, float) else str(x) for x in row.values()]
                    print(f"| {' | '.join(cells)} |")
                for policy in PRODUCT:
                    found = [row[policy] for row in rows]
                    print(f"\n{policy}: mean {fmean(found):.3f}, least {min(found):.3f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
