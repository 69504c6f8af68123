# SPDX-License-Identifier: Apache-2.0
"""Results files, read back by machine: device and target."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.paper.methods import PLAIN
from benchmarks.paper.stats import Cell, Ratio, sameness, speedup
from benchmarks.paper.store import Key, Row, read_rows

Cells = dict[str, dict[str, Cell]]  # method -> set -> its responses


@dataclass
class Machine:
    name: str
    device: str
    commands: list[str] = field(default_factory=list)
    settings: Row = field(default_factory=dict)
    commits: dict[str, None] = field(default_factory=dict)
    # the first row of each; plain decoding has one in each round
    responses: dict[tuple[Key, str | None], Row] = field(default_factory=dict)
    near_ties: set[Key] = field(default_factory=set)
    gaps: list[Row] = field(default_factory=list)
    replayed: list[Row] = field(default_factory=list)

    def cells(self, temperature: float, concurrency: int) -> Cells:
        found: dict[str, dict[str, list[Row]]] = {}
        for (key, _), row in self.responses.items():
            if (key.temperature, key.concurrency) == (temperature, concurrency):
                found.setdefault(key.method, {}).setdefault(key.set, []).append(row)
        return {
            method: {name: Cell(rows) for name, rows in sets.items()}
            for method, sets in found.items()
        }

    def same(self, sets: dict[str, Cell]) -> str:
        rows = [row for cell in sets.values() for row in cell.rows]
        return sameness(rows, self.near_ties, Key.of)

    def situations(self) -> list[tuple[float, int]]:
        return sorted({(key.temperature, key.concurrency) for key, _ in self.responses})


def machines(files: Iterable[Path]) -> list[Machine]:
    found: dict[tuple[str, str], Machine] = {}
    for path in files:
        for row in read_rows(path):
            if row["kind"] == "run":
                source = row["provenance"]
                where = row["name"], source["device"]
                current = found.setdefault(where, Machine(*where))
                current.settings = current.settings or row["settings"]
                if source["command"] not in current.commands:
                    current.commands.append(source["command"])
                current.commits[str(source["commit"])[:7]] = None
            _add(current, row)
    return list(found.values())


def ratios(cells: Cells, method: str) -> dict[str, Ratio]:
    """Speed-ups of a method by set, and their mean as "mean" if it ran on all of plain's sets."""
    plain, own = cells.get(PLAIN, {}), cells[method]
    sets = [name for name in plain if name in own]
    found = {name: speedup([(plain[name], own[name])]) for name in sets}
    if plain and len(sets) == len(plain):
        found["mean"] = speedup([(plain[name], own[name]) for name in sets])
    return found


def _add(machine: Machine, row: Row) -> None:
    kind = row["kind"]
    if kind == "response":
        key = Key.of(row)
        machine.responses.setdefault((key, row.get("round") if key.method == PLAIN else None), row)
    elif kind == "judged" and row["near_tie"]:
        machine.near_ties.add(Key.of(row))
    elif kind == "replayed":
        machine.replayed.append(row)
    elif kind == "gap":
        machine.gaps.append(row)
