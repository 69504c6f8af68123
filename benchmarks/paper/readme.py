# SPDX-License-Identifier: Apache-2.0
"""The README's table, from results files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.paper.machines import Cells, Machine, ratios
from benchmarks.paper.methods import ALL_CHAINS, PLAIN, V2, chain_name
from benchmarks.paper.stats import Ratio


def readme_table(found: Sequence[Machine], command: str) -> str:
    """The README's table between its markers: a row per machine, load, temperature and drafter."""
    devices = list(dict.fromkeys(machine.device for machine in found))
    lines = [
        f"| {devices[0] if len(devices) == 1 else ''} | plain | vLLM's best chain "
        "| chain in our engine | best fixed N | adaptive | tau: chain, adaptive | same as plain |",
        "|---" * 8 + "|",
    ]
    for machine in found:
        device = "" if len(devices) == 1 else f", {machine.device}"
        for temperature, concurrency in machine.situations():
            cells = machine.cells(temperature, concurrency)
            for label in _labels(cells):
                drafter = f" with {label}" if label else ""
                where = f"{machine.name}{drafter}{device}, T={temperature:g}"
                row = _readme_row(machine, cells, label)
                lines.append(f"| {where}, {concurrency} at a time | {row} |")
    return "\n".join([*lines, "", f"`{command}`"])


def _labels(cells: Cells) -> list[str]:
    """Drafters with an adaptive engine; the pair's own has an empty label."""
    return [label for name in cells if (label := _label(name)) is not None]


def _label(name: str) -> str | None:
    found = re.fullmatch(r"bastion (?:(\S+) )?adaptive", name)
    return None if found is None else found[1] or ""


def _readme_row(machine: Machine, cells: Cells, label: str) -> str:
    speeds = {name: ratios(cells, name).get("mean") for name in cells}
    ours = f"bastion {label} ".replace("  ", " ")
    chain = _best(speeds, [chain_name(n, label) + v for n in ALL_CHAINS for v in ("", V2)])
    fixed = _best(speeds, [name for name in cells if name.startswith(f"{ours}N=")])
    adaptive = f"{ours}adaptive"
    plain = fmean(cell.numbers()["tokens_per_s"] for cell in cells[PLAIN].values())
    row = [f"{plain:.0f} tokens/s"]
    for name in (chain, f"{ours}chain", fixed, adaptive):
        ratio = speeds.get(name or "")
        size = re.search(r"\d+(, V2)?(?=$| runner)", name or "")
        row.append(f"{ratio}{f' ({size[0]})' if size else ''}" if ratio else "")
    taus = [
        f"{fmean(cell.numbers()['tau'] for cell in cells[name].values()):.2f}" if name else "none"
        for name in (chain, adaptive)
    ]
    row.append(", ".join(taus))
    row.append(machine.same(cells[adaptive]))
    return " | ".join(row)


def _best(speeds: dict[str, Ratio | None], names: Iterable[str]) -> str | None:
    ran = [(ratio.mean, name) for name in names if (ratio := speeds.get(name)) is not None]
    return max(ran)[1] if ran else None


def update_between_markers(path: Path, marker: str, text: str) -> None:
    """Replace what is between `<!-- marker:begin -->` and `<!-- marker:end -->` in a file.

    Raises:
        ValueError: the file has no such markers.
    """
    begin, end = f"<!-- {marker}:begin -->", f"<!-- {marker}:end -->"
    page = path.read_text(encoding="utf-8")
    if begin not in page or end not in page:
        raise ValueError(f"{path.name} has no lines {begin} and {end}")
    before, rest = page.split(begin, 1)
    after = rest.split(end, 1)[1]
    path.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")
