# SPDX-License-Identifier: Apache-2.0
"""A method's numbers on a set, from its responses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.paper.store import Row

RESAMPLES = 2000
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Cell:
    """The responses of one method on one set, at one temperature and concurrency."""

    rows: Sequence[Row]

    def rate(self, above: str, below: str) -> float:
        """Sum of one field over the sum of another; NaN without any."""
        total = sum(row[below] for row in self.rows)
        return sum(row[above] for row in self.rows) / total if total else float("nan")

    def numbers(self) -> dict[str, float]:
        verify, draft, step = (self.rate(f"{p}_ms", "steps") for p in ("verify", "draft", "step"))
        tokens = sum(row["tokens"] for row in self.rows)
        own = [row["emitted"] / row["forwards"] for row in self.rows if row["forwards"]]
        return {
            "responses": len(self.rows),
            "token_ms": float(np.mean([token_ms(row) for row in self.rows])),
            "tokens_per_s": tokens / spent(self.rows, "begin_s", "end_s"),
            "tau": self.rate("emitted", "forwards"),
            "tau_of_responses": float(np.mean(own)) if own else float("nan"),
            "nodes": self.rate("verified", "forwards"),
            "draft_ms": draft,
            "verify_ms": verify,
            "aux_ms": step - verify - draft,
            "ttft_ms": float(
                np.mean([1e3 * (row["first_s"] - row["begin_s"]) for row in self.rows])
            ),
        }


def token_ms(row: Row) -> float:
    return 1e3 * (row["end_s"] - row["first_s"]) / max(1, row["tokens"] - 1)


def spent(rows: Iterable[Row], begin: str, end: str) -> float:
    """Seconds while any of the responses ran; each session has its own clock."""
    spans: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        spans.setdefault(row["session"], []).append((row[begin], row[end]))
    total = 0.0
    for own in spans.values():
        reached = float("-inf")
        for first, last in sorted(own):
            total += max(0.0, last - max(first, reached))
            reached = max(reached, last)
    return total


@dataclass(frozen=True)
class Ratio:
    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.2f}x [{self.low:.2f}, {self.high:.2f}]"


def speedup(pairs: Sequence[tuple[Cell, Cell]], seed: int = 0) -> Ratio:
    """Mean over sets of plain decoding's time per token over the method's.

    Only responses that both have count: see `_paired`. Each resample draws prompts anew within
    every set, the same ones for both.

    Args:
        pairs: of every set, (plain decoding's cell, the method's).
    """
    rng = np.random.default_rng(seed)
    means, samples = [], []
    for plain, own in pairs:
        before, after = _paired(plain, own)
        if not len(before):
            return Ratio(float("nan"), float("nan"), float("nan"))
        means.append(before.mean() / after.mean())
        picks = rng.integers(len(before), size=(RESAMPLES, len(before)))
        samples.append(before[picks].mean(1) / after[picks].mean(1))
    if not means:
        return Ratio(float("nan"), float("nan"), float("nan"))
    low, high = np.percentile(np.mean(samples, axis=0), [2.5, 97.5])
    return Ratio(float(np.mean(means)), float(low), float(high))


def _paired(plain: Cell, own: Cell) -> tuple[Floats, Floats]:
    """Times per token, ms, by prompt: means over its turns.

    A response of a round is paired with plain decoding's of the same round, another one with plain
    decoding's of the same prompt and turn.
    """
    of_round = {(row["round"], *_turn(row)): row for row in plain.rows if "round" in row}
    first: dict[Any, Row] = {}
    for row in plain.rows:
        first.setdefault(_turn(row), row)
    found: dict[str, list[tuple[float, float]]] = {}
    for row in own.rows:
        partner = of_round.get((row.get("round"), *_turn(row)), first.get(_turn(row)))
        if partner is not None:
            found.setdefault(row["id"], []).append((token_ms(partner), token_ms(row)))
    means = np.array([np.mean(values, axis=0) for values in found.values()]).reshape(-1, 2)
    return means[:, 0], means[:, 1]


def throughput(plain: Cell, own: Cell) -> float:
    """The method's tokens per second over plain decoding's in the same rounds."""
    rounds = {row.get("round") for row in own.rows}
    beside = Cell([row for row in plain.rows if row.get("round") in rounds] or plain.rows)
    return own.numbers()["tokens_per_s"] / beside.numbers()["tokens_per_s"]


def _turn(row: Row) -> tuple[str, int]:
    return row["id"], row["turn"]


def sameness(rows: Sequence[Row], tied: Iterable[Any], key_of: Any) -> str:
    """The losslessness column of one method at one temperature: see the command's text."""
    compared = [row for row in rows if "differs_at" in row]
    sampled = any(row["temperature"] > 0 for row in rows)
    if not compared:
        return "other draws" if sampled else ""
    different = [row for row in compared if row["differs_at"] is not None]
    text = f"{len(compared) - len(different)}/{len(compared)}"
    if sampled:
        return f"{text} seeded" + (f", {len(different)} not judged" if different else "")
    known = set(tied)
    near = sum(key_of(row) in known for row in different)
    return f"{text}, {near} near-ties" if near else text
