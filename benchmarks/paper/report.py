# SPDX-License-Identifier: Apache-2.0
"""Tables and figures from results files, also of several machines.

    python -m benchmarks.paper report A.jsonl B.jsonl --out FOLDER

Responses of the same device, target and temperature belong together, whichever file they are in.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks import RESULTS
from benchmarks.paper import figures
from benchmarks.paper.machines import Cells, Machine, machines, ratios
from benchmarks.paper.methods import PLAIN
from benchmarks.paper.stats import Ratio, throughput
from benchmarks.paper.store import Row

_COLUMNS = (
    ("tokens/s", "tokens_per_s", 1),
    ("tau, rounds", "tau", 2),
    ("tau, responses", "tau_of_responses", 2),
    ("N", "nodes", 1),
    ("T_draft", "draft_ms", 2),
    ("T_verify", "verify_ms", 2),
    ("T_aux", "aux_ms", 2),
    ("TTFT ms", "ttft_ms", 1),
)


def markdown(machine: Machine) -> str:
    lines = [f"# {machine.name} on {machine.device}", ""]
    lines += [f"`{command}`" for command in machine.commands]
    lines += ["", f"Commits {', '.join(machine.commits)}; {_said(machine)}.", ""]
    for temperature, concurrency in machine.situations():
        cells = machine.cells(temperature, concurrency)
        lines += [f"## T={temperature:g}, concurrency {concurrency}", ""]
        lines += _wide_table(machine, cells)
        lines += _set_table(cells)
        lines += _replayed_table(machine, temperature) if concurrency == 1 else []
        lines += _throughput_table(cells) if concurrency > 1 else []
        lines += _errors_table(cells)
    lines += _load_table(machine)
    if machine.gaps:
        lines += ["## Gaps", ""]
        lines += [f"- {line}" for line in dict.fromkeys(map(_gap, machine.gaps))] + [""]
    return "\n".join(lines)


def _wide_table(machine: Machine, cells: Cells) -> list[str]:
    names = " | ".join(name for name, *_ in _COLUMNS)
    lines = [f"| | speed-up [95%] | {names} | same |", "|---" * (len(_COLUMNS) + 3) + "|"]
    for method, sets in cells.items():
        numbers = [cell.numbers() for cell in sets.values()]
        row = [str(ratios(cells, method).get("mean", ""))]
        row += [_number(fmean(n[key] for n in numbers), digits) for _, key, digits in _COLUMNS]
        row.append(machine.same(sets))
        lines.append(f"| {method} | {' | '.join(row)} |")
    return [*lines, ""]


def _set_table(cells: Cells) -> list[str]:
    sets = list(dict.fromkeys(name for own in cells.values() for name in own))
    head = " | ".join(f"{name} | tau" for name in sets)
    lines = [f"| | {head} | mean | tau |", "|---" * (2 * len(sets) + 3) + "|"]
    for method, own in cells.items():
        found = ratios(cells, method)
        row = []
        for name in sets:
            row += (
                [_times(found.get(name)), _number(own[name].numbers()["tau"], 2)]
                if (name in own)
                else ["", ""]
            )
        row += [_times(found.get("mean"))]
        row += [_number(fmean(cell.numbers()["tau"] for cell in own.values()), 2)]
        lines.append(f"| {method} | {' | '.join(row)} |")
    return [*lines, ""]


def _throughput_table(cells: Cells) -> list[str]:
    """Tokens per second, prompts included, over plain decoding's."""
    plain = cells.get(PLAIN, {})
    if not plain:
        return []
    lines = [f"| tokens/s over plain | {' | '.join(plain)} | mean |"]
    lines += ["|---" * (len(plain) + 2) + "|"]
    for method, own in cells.items():
        found = [throughput(plain[name], own[name]) for name in plain if name in own]
        if len(found) == len(plain):
            row = " | ".join(f"{ratio:.2f}x" for ratio in [*found, fmean(found)])
            lines.append(f"| {method} | {row} |")
    return [*lines, ""]


def _replayed_table(machine: Machine, temperature: float) -> list[str]:
    rows = [row for row in machine.replayed if row["temperature"] == temperature]
    if not rows:
        return []
    prompts = sum(row["prompts"] for row in rows if row["policy"] == rows[0]["policy"])
    lines = [
        f"On drafts of {prompts} prompts, replayed with this machine's step costs:",
        "",
        "| | speed-up | tau | N |",
        "|---|---|---|---|",
    ]
    for policy in dict.fromkeys(row["policy"] for row in rows):
        own = [row for row in rows if row["policy"] == policy]
        means = [fmean(row[key] for row in own) for key in ("speedup", "tau", "nodes")]
        lines.append(f"| {policy} | {means[0]:.2f}x | {means[1]:.2f} | {means[2]:.1f} |")
    return [*lines, ""]


def _errors_table(cells: Cells) -> list[str]:
    """Root mean squares of the errors of predicted step times: see `watch_predictions`."""
    lines = []
    for method, sets in cells.items():
        rows = [row for cell in sets.values() for row in cell.rows if row.get("squared_ms")]
        steps = sum(row["timed_steps"] for row in rows)
        names = sorted({name for row in rows for name in row["squared_ms"]})
        sums = [sum(row["squared_ms"].get(name, 0.0) for row in rows) for name in names]
        found = [f"{name} {(total / steps) ** 0.5:.3g}" for name, total in zip(names, sums)]
        lines += [f"- {method}: {', '.join(found)}"] if found else []
    return ["RMSE of predicted step times, ms:", "", *lines, ""] if lines else []


def _load_table(machine: Machine) -> list[str]:
    lines = []
    for temperature in sorted({t for t, _ in machine.situations()}):
        levels = [c for t, c in machine.situations() if t == temperature]
        if len(levels) < 2:
            continue
        cells = {c: machine.cells(temperature, c) for c in levels}
        lines += [f"## T={temperature:g}, mean speed-up by concurrency", ""]
        lines += [f"| | {' | '.join(map(str, levels))} |", "|---" * (len(levels) + 1) + "|"]
        for method in dict.fromkeys(name for own in cells.values() for name in own):
            row = [
                _times(ratios(cells[c], method).get("mean")) if method in cells[c] else ""
                for c in levels
            ]
            lines.append(f"| {method} | {' | '.join(row)} |")
        lines.append("")
    return lines


def write(files: Sequence[Path], out: Path, stem: str) -> int:
    """Write STEM.md and the figures of all machines; print the page."""
    found = machines(files)
    out.mkdir(parents=True, exist_ok=True)
    page = "\n".join(markdown(machine) for machine in found)
    (out / f"{stem}.md").write_text(page)
    for number, machine in enumerate(found):
        figures.draw(machine, out, stem if number == 0 else f"{stem}-{number + 1}")
    print(page)
    return 0


def main(argv: Sequence[str]) -> int:
    """Entry point of `python -m benchmarks.paper report`."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.paper report", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=RESULTS / "paper", help="folder")
    parser.add_argument("--stem", help="name of the files (default: of the first results file)")
    given = parser.parse_args(argv)
    missing = [path.name for path in given.files if not path.is_file()]
    if missing:
        parser.error(f"no file {missing[0]}")
    return write(given.files, given.out, given.stem or given.files[0].stem)


def _said(machine: Machine) -> str:
    settings = machine.settings
    samples = (
        "the paper's samples"
        if settings.get("samples") is None
        else (f"{settings['samples']} prompts a set")
    )
    ways = {"round" in row for row in machine.responses.values()}
    turns = "engines in turn" if ways == {True} else "one engine after another"
    if len(ways) > 1:
        turns = "some engines in turn, some one after another"
    return f"{samples}, {settings.get('tokens')} new tokens, {settings.get('dtype')}, {turns}"


def _gap(row: Row) -> str:
    if "set" in row:
        return str(row["reason"])
    where = f", concurrency {row['concurrency']}" if "concurrency" in row else ""
    return f"{row['method']}{where}: {row['reason']}"


def _times(ratio: Ratio | None) -> str:
    return "" if ratio is None else f"{ratio.mean:.2f}x"


def _number(value: Any, digits: int) -> str:
    return "" if value != value else f"{value:.{digits}f}"
