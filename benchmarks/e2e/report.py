# SPDX-License-Identifier: Apache-2.0
"""The page of a results file. The command's text says what its columns are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, geometric_mean, median
from typing import Any

import numpy as np

from benchmarks.e2e.methods import PLAIN
from benchmarks.e2e.store import Round, Row

_RESAMPLES = 2000
_COLUMNS = ("tokens/s", "tau", "N", "T_draft", "T_verify", "T_aux", "TTFT ms", "same")


@dataclass(frozen=True)
class Ratio:
    """How many times as fast: the mean of sets, its 95% interval, and the ratios of all rounds."""

    mean: float
    low: float
    high: float
    rounds: list[float]

    def __str__(self) -> str:
        return f"{self.mean:.3f}x [{self.low:.3f}, {self.high:.3f}]"


def cost(row: Row) -> float:
    """Milliseconds a token: of one request after its first token, or of all with their prompts."""
    if row["concurrency"] == 1:
        return float(row["token_ms"])
    return 1e3 * float(row["seconds"]) / row["tokens"]


def ratio(base: Sequence[Row], own: Sequence[Row], seed: int = 0) -> Ratio | None:
    """How many times as fast `own` is as `base`, over the rounds that both have.

    A round is paired with the one that `base` decoded beside it, if there is one. Of a set it is
    the ratio of mean costs; intervals draw rounds anew, the same ones for both.
    """
    beside = {(row["group"], Round.of(row)): row for row in base}
    first: dict[Round, Row] = {}
    for row in base:
        first.setdefault(Round.of(row), row)
    pairs: dict[str, list[tuple[float, float]]] = {}
    for row in own:
        where = Round.of(row)
        partner = beside.get((row["group"], where), first.get(where))
        if partner is not None:
            pairs.setdefault(row["set"], []).append((cost(partner), cost(row)))
    if not pairs:
        return None
    rng, means, samples = np.random.default_rng(seed), [], []
    for found in pairs.values():
        before, after = np.array(found).T
        means.append(before.mean() / after.mean())
        picks = rng.integers(len(before), size=(_RESAMPLES, len(before)))
        samples.append(before[picks].mean(1) / after[picks].mean(1))
    low, high = np.percentile(np.mean(samples, axis=0), [2.5, 97.5])
    each = [a / b for found in pairs.values() for a, b in found]
    return Ratio(fmean(means), float(low), float(high), each)


def by_start(base: Sequence[Row], own: Sequence[Row]) -> list[float]:
    """How many times as fast `own` is, with the engines of each start."""
    found = []
    for start in dict.fromkeys(row["group"] for row in own):
        parts = ([row for row in rows if row["group"] == start] for rows in (base, own))
        if (one := ratio(*parts)) is not None:
            found.append(one.mean)
    return found


def page(rows: Sequence[Row]) -> str:
    runs = [row for row in rows if row["kind"] == "run"]
    source, settings = runs[0]["provenance"], runs[0]["settings"]
    commits = dict.fromkeys(str(row["provenance"]["commit"])[:7] for row in runs)
    lines = [f"# {runs[0]['name']} on {source['device']}", ""]
    lines += dict.fromkeys(f"`{row['provenance']['command']}`" for row in runs)
    turns = "engines in turn" if settings["alive"] > 1 else "one engine after another"
    lines += ["", f"Commits {', '.join(commits)}; {settings['dtype']}, {turns}.", ""]
    found = [row for row in rows if row["kind"] == "round"]
    tied = {
        (row["method"], Round.of(row), row["id"])
        for row in rows
        if row["kind"] == "judged" and row["near_tie"]
    }
    situations = sorted({(row["temperature"], row["concurrency"]) for row in found})
    for temperature, concurrency in situations:
        own = [
            r for r in found if (r["temperature"], r["concurrency"]) == (temperature, concurrency)
        ]
        lines += [f"## T={temperature:g}, concurrency {concurrency}", ""]
        lines += _wide_table(own, tied) + _set_table(own) + _against(own)
    gaps = [row for row in rows if row["kind"] == "gap"]
    if gaps:
        lines += ["## Gaps", "", *dict.fromkeys(map(_gap, gaps)), ""]
    return "\n".join(lines)


def by_method(rows: Iterable[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["method"], []).append(row)
    return found


def numbers(rows: Sequence[Row]) -> dict[str, float]:
    total = {name: sum(row[name] for row in rows) for name in ("tokens", "seconds", "emitted")}
    forwards, steps = (sum(row[name] for row in rows) for name in ("forwards", "steps"))
    parts = {
        name: sum(row[f"{name}_ms"] for row in rows) / max(1, steps)
        for name in ("step", "verify", "draft")
    }
    return {
        "tokens/s": total["tokens"] / total["seconds"],
        "tau": total["emitted"] / max(1, forwards),
        "N": sum(row["verified"] for row in rows) / max(1, forwards),
        "T_draft": parts["draft"],
        "T_verify": parts["verify"],
        "T_aux": parts["step"] - parts["verify"] - parts["draft"],
        "TTFT ms": fmean(row["ttft_ms"] for row in rows),
    }


def same(rows: Sequence[Row], tied: set[Any]) -> str:
    """Replies with the tokens of the method that they are compared with."""
    compared = [row for row in rows if "compared_with" in row]
    if not compared:
        return ""
    total = sum(row["responses"] for row in compared)
    differing = [
        (row["method"], Round.of(row), name) for row in compared for name in row["differs"]
    ]
    near = sum(where in tied for where in differing)
    return f"{total - len(differing)}/{total}" + (f", {near} near-ties" if near else "")


def _wide_table(rows: Sequence[Row], tied: set[Any]) -> list[str]:
    methods = by_method(rows)
    lines = [f"| | over plain [95%] | median | {' | '.join(_COLUMNS)} |"]
    lines.append("|---" * (len(_COLUMNS) + 3) + "|")
    for name, own in methods.items():
        over, found = ratio(methods.get(PLAIN, []), own), numbers(own)
        shown = f"{over} | {median(over.rounds):.3f}x" if over is not None else " | "
        values = [f"{found[column]:.2f}" for column in _COLUMNS[:-1]]
        lines.append(f"| {name} | {shown} | {' | '.join(values)} | {same(own, tied)} |")
    return [*lines, ""]


def _set_table(rows: Sequence[Row]) -> list[str]:
    sets = list(dict.fromkeys(row["set"] for row in rows))
    if len(sets) < 2:
        return []
    methods = by_method(rows)
    lines = [f"| times plain, tau | {' | '.join(sets)} |", "|---" * (len(sets) + 1) + "|"]
    for name, own in methods.items():
        cells = []
        for one in sets:
            part = [row for row in own if row["set"] == one]
            over = ratio(methods.get(PLAIN, []), part)
            cells.append("" if over is None else f"{over.mean:.2f}x, {numbers(part)['tau']:.2f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return [*lines, ""]


def _against(rows: Sequence[Row]) -> list[str]:
    """This checkout's methods over another one's."""
    methods, lines = by_method(rows), []
    for before, found in methods.items():
        name, _, label = before.partition(" @ ")
        if each := by_start(found, methods.get(name, [])) if label else []:
            cells = f"{geometric_mean(each):.3f}x | {', '.join(f'{one:.3f}' for one in each)}"
            lines.append(f"| {name} | {label} | {cells} | {len(found)} |")
    return ["| | over | | by start | rounds |", "|---" * 5 + "|", *lines, ""] if lines else []


def _gap(row: Row) -> str:
    where = f"{row['method']}, concurrency {row['concurrency']}: " if "method" in row else ""
    return f"- {where}{row['reason']}"
