# SPDX-License-Identifier: Apache-2.0
"""Tables from drives: medians over repeats, ratios within a repeat, means over domains."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from benchmarks.prompts import DOMAINS
from benchmarks.speed.methods import (
    ADAPTIVE,
    BUDGETS,
    CHAINS,
    PLAIN,
    adaptive_name,
    chain_name,
    fixed_name,
)

BEST_CHAIN, BEST_FIXED, ORACLE = "best dflash chain", "best fixed N", "oracle per domain"
# Fields of a run, all sums of its drive: see `worker.Outcome`.
Run = dict[str, Any]


@dataclass
class Cell:
    """One method at one temperature and concurrency in one domain."""

    runs: list[Run]
    # Over plain decoding, one per repeat; empty where plain decoding did not run.
    speedups: dict[int, float]

    @property
    def speedup(self) -> float:
        """Median over repeats; NaN without plain decoding."""
        return median(self.speedups.values()) if self.speedups else float("nan")

    def rate(self, above: str, below: str) -> float:
        """Sum of one field over the sum of another."""
        total = self._sum(below)
        return self._sum(above) / total if total else float("nan")

    def _sum(self, name: str) -> Any:
        return sum(run[name] for run in self.runs)

    def numbers(self) -> dict[str, Any]:
        """The numbers of the tables."""
        speeds = [run["tokens"] / run["seconds"] for run in self.runs]
        verify, draft, step = (
            self.rate(f"{part}_ms", "steps") for part in ("verify", "draft", "step")
        )
        return {
            "speedup": self.speedup,
            "speedup_range": [min(self.speedups.values()), max(self.speedups.values())]
            if self.speedups
            else None,
            "tokens_per_s": median(speeds),
            "tokens_per_s_range": [min(speeds), max(speeds)],
            "tpot_ms": median(run["tpot_ms"] for run in self.runs),
            "tau": self.rate("emitted", "forwards"),
            "nodes": self.rate("verified", "forwards"),
            "verify_ms": verify,
            "draft_ms": draft,
            "aux_ms": step - verify - draft,
            "same_as_plain": f"{self._sum('same_as_plain')}/{self._sum('requests')}",
            "repeats": len(self.runs),
        }


# (temperature, concurrency) -> domain -> method
Table = dict[tuple[float, int], dict[str, dict[str, Cell]]]


def tabulate(runs: Iterable[Run]) -> Table:
    """The cells of all runs. Each group has its own repeats; plain decoding has those of all."""
    rows = list(runs)
    speed = {}
    for run in rows:
        if run["engine"] == PLAIN:
            speed[_moment(run)] = run["tokens"] / run["seconds"]
    grouped: dict[tuple[Any, ...], list[Run]] = defaultdict(list)
    for run in rows:
        key = (run["temperature"], run["concurrency"]), run["domain"], run["engine"]
        grouped[key].append(run)
    table: Table = {}
    for (where, domain, name), own in grouped.items():
        speedups = {
            index: run["tokens"] / run["seconds"] / speed[_moment(run)]
            for index, run in enumerate(own)
            if _moment(run) in speed
        }
        table.setdefault(where, {}).setdefault(domain, {})[name] = Cell(own, speedups)
    return table


def _moment(run: Run) -> tuple[Any, ...]:
    return tuple(run[k] for k in ("group", "temperature", "concurrency", "domain", "repeat"))


def mean_speedup(domains: dict[str, dict[str, Cell]], name: str) -> float:
    """Mean of a method's speed-ups over the domains; NaN if it did not run on all of them."""
    cells = [cells.get(name) for cells in domains.values()]
    return fmean(cell.speedup if cell else float("nan") for cell in cells)


def best_of(domains: dict[str, dict[str, Cell]], names: Sequence[str]) -> str | None:
    """The method with the highest mean speed-up among those that ran on every domain."""
    ran = [name for name in names if all(name in cells for cells in domains.values())]
    return max(ran, key=lambda name: mean_speedup(domains, name), default=None)


def best_chain(domains: dict[str, dict[str, Cell]], drafter: str = "") -> str | None:
    """vLLM's own chain of a drafter at its best length."""
    return best_of(domains, [chain_name(length, drafter) for length in CHAINS])


def ratios(domains: dict[str, dict[str, Cell]], drafter: str = "") -> dict[str, Any]:
    """A drafter's adaptive engine over its other engines: means over domains of medians.

    `worst` is the ratio to the better of plain decoding and the best chain, in the domain where it
    is lowest. The oracle uses the best fixed budget of every domain.
    """
    out: dict[str, Any] = {}
    fixed, own = [fixed_name(nodes, drafter) for nodes in BUDGETS], adaptive_name(drafter)
    if any(own not in cells for cells in domains.values()):
        return out
    chain, budget = best_chain(domains, drafter), best_of(domains, fixed)
    out["plain"] = mean_speedup(domains, own)
    if chain is not None:
        out[BEST_CHAIN] = _mean_ratio(domains, own, lambda cells: cells[chain].speedup)
        out["chain"] = chain
    better = {
        domain: cells[own].speedup / max(1.0, cells[chain].speedup if chain else 1.0)
        for domain, cells in domains.items()
    }
    worst = min(better, key=better.__getitem__)
    out["worst"] = {"domain": worst, "ratio": better[worst]}
    if budget is not None:
        out[BEST_FIXED] = _mean_ratio(domains, own, lambda cells: cells[budget].speedup)
        out["fixed"] = budget
        out[ORACLE] = _mean_ratio(
            domains, own, lambda cells: max(cells[n].speedup for n in fixed if n in cells)
        )
    return out


def _mean_ratio(
    domains: dict[str, dict[str, Cell]], own: str, other: Callable[[dict[str, Cell]], float]
) -> float:
    return fmean(cells[own].speedup / other(cells) for cells in domains.values())


def _ratios_of_others(domains: dict[str, dict[str, Cell]]) -> dict[str, dict[str, Any]]:
    """`ratios` of drafters other than the pair's own, by the names of their rows."""
    before, after = adaptive_name("/").split("/")
    found = {}
    for name in _names(domains):
        if name != ADAPTIVE and name.startswith(before) and name.endswith(after):
            drafter = name.removeprefix(before).removesuffix(after)
            found[name] = ratios(domains, drafter)
    return found


def summary(table: Table) -> list[dict[str, Any]]:
    """Everything as JSON: one entry per temperature and concurrency."""
    return [
        {
            "temperature": temperature,
            "concurrency": concurrency,
            "domains": {
                domain: {name: cell.numbers() for name, cell in cells.items()}
                for domain, cells in domains.items()
            },
            "mean_speedup": {name: mean_speedup(domains, name) for name in _names(domains)},
            "adaptive_over": ratios(domains),
            "other_drafters_over": _ratios_of_others(domains),
        }
        for (temperature, concurrency), domains in sorted(table.items())
    ]


def markdown(table: Table, errors: dict[str, float], command: str, title: str) -> str:
    """The tables of a report."""
    lines = [f"# {title}", "", f"`{command}`", ""]
    for (temperature, concurrency), domains in sorted(table.items()):
        lines += [f"## T={temperature:g}, concurrency {concurrency}", ""]
        lines += _method_table(domains)
        for name, found in ({ADAPTIVE: ratios(domains)} | _ratios_of_others(domains)).items():
            lines += _ratio_lines(name, found)
    lines += _concurrency_table(table)
    if errors:
        lines += ["## Prediction errors of the controller", ""]
        lines += ["| prediction of | RMSE, ms |", "|---|---|"]
        lines += [f"| {name} | {value:.3g} |" for name, value in errors.items()] + [""]
    return "\n".join(lines)


def _method_table(domains: dict[str, dict[str, Cell]]) -> list[str]:
    order = [domain for domain in DOMAINS if domain in domains]
    head = "".join(f" {domain} | tau |" for domain in order)
    lines = [
        f"| |{head} mean | spread | tokens/s | ms/token | N | T_draft | T_verify | T_aux |",
        "|---" * (2 * len(order) + 9) + "|",
    ]
    for name in _names(domains):
        numbers = {d: cells[name].numbers() for d, cells in domains.items() if name in cells}
        cells = []
        for domain in order:
            row = numbers.get(domain)
            cells += [f"{row['speedup']:.2f}x", f"{row['tau']:.2f}"] if row else ["", ""]
        ranges = [row["speedup_range"] for row in numbers.values() if row["speedup_range"]]
        spread = max((high / low - 1 for low, high in ranges), default=float("nan"))
        cells += [f"{mean_speedup(domains, name):.2f}x", f"{spread:.0%}"]
        for key, digits in (
            ("tokens_per_s", 1),
            ("tpot_ms", 2),
            ("nodes", 1),
            ("draft_ms", 2),
            ("verify_ms", 2),
            ("aux_ms", 2),
        ):
            cells.append(f"{fmean(row[key] for row in numbers.values()):.{digits}f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return [*lines, ""]


def _ratio_lines(name: str, found: dict[str, Any]) -> list[str]:
    if not found:
        return []
    parts = [f"plain {found['plain']:.2f}x"]
    for key, note in ((BEST_CHAIN, "chain"), (BEST_FIXED, "fixed"), (ORACLE, None)):
        if key in found:
            parts.append(f"{key}{f' ({found[note]})' if note else ''} {found[key]:.2f}x")
    worst = found["worst"]
    parts.append(
        f"the better of plain and chain at worst {worst['ratio']:.2f}x ({worst['domain']})"
    )
    return [f"{name} over {', '.join(parts)}", ""]


def _concurrency_table(table: Table) -> list[str]:
    lines = []
    for temperature in sorted({temperature for temperature, _ in table}):
        levels = sorted(c for t, c in table if t == temperature)
        if len(levels) < 2:
            continue
        lines += [f"## T={temperature:g}, mean speed-up by concurrency", ""]
        lines += [f"| | {' | '.join(map(str, levels))} |", "|---" * (len(levels) + 1) + "|"]
        names = dict.fromkeys(n for c in levels for n in _names(table[temperature, c]))
        for name in names:
            row = [f"{mean_speedup(table[temperature, c], name):.2f}x" for c in levels]
            lines.append(f"| {name} | {' | '.join(row)} |")
        lines.append("")
    return lines


def _names(domains: dict[str, dict[str, Cell]]) -> list[str]:
    order = [PLAIN, *map(chain_name, CHAINS), *map(fixed_name, BUDGETS), ADAPTIVE]
    ran = dict.fromkeys(name for cells in domains.values() for name in cells)
    # Rows of other drafters in the order of `methods.engines`.
    return [*(name for name in order if name in ran), *(name for name in ran if name not in order)]
