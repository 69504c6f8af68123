# SPDX-License-Identifier: Apache-2.0
"""What is decoded, and in which order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.paper.methods import Method
from benchmarks.paper.store import Key
from benchmarks.prompts import Prompt


@dataclass(frozen=True)
class Plan:
    """What is decoded.

    Args:
        prompts: all sets' prompts; a prompt's seed is `seed` plus its number in its set.
        concurrency: requests at a time, the reference's first.
        alive: engines that live side by side; 1: one after another.
    """

    methods: dict[str, Method]
    prompts: Sequence[Prompt]
    temperatures: Sequence[float]
    concurrency: Sequence[int]
    tokens: int
    seed: int
    ignore_eos: bool
    alive: int = 1

    def keys(self, method: str) -> Iterator[Key]:
        longest = max(len(prompt.turns) for prompt in self.prompts)
        for concurrency in self.concurrency:
            for temperature in self.temperatures:
                for turn in range(longest):
                    for one in self.prompts:
                        if turn < len(one.turns):
                            yield Key(method, temperature, concurrency, one.set, one.id, turn)

    def levels(self) -> list[Sequence[int]]:
        """The concurrencies that an engine serves: each has its own, or all share one in turn."""
        return [self.concurrency] if self.alive > 1 else [[one] for one in self.concurrency]

    def seeds(self) -> dict[tuple[str, str], int]:
        numbers: dict[str, int] = {}
        seeds = {}
        for prompt in self.prompts:
            number = numbers[prompt.set] = numbers.get(prompt.set, -1) + 1
            seeds[prompt.set, prompt.id] = self.seed + number
        return seeds


def batches(keys: Iterable[Key], concurrency: int, paired: bool) -> Iterator[list[Key]]:
    """The keys of a concurrency, split where temperature, set or turn changes.

    Side by side and one request at a time, each is a batch of its own.
    """
    batch: list[Key] = []
    for key in keys:
        if key.concurrency != concurrency:
            continue
        alone = paired and concurrency == 1
        if batch and (alone or _cell(batch[-1]) != _cell(key)):
            yield batch
            batch = []
        batch.append(key)
    if batch:
        yield batch


def _cell(key: Key) -> tuple[Any, ...]:
    return key.temperature, key.set, key.turn
