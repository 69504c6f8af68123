# SPDX-License-Identifier: Apache-2.0
"""Prompts from files of JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

Row = dict[str, Any]
T = TypeVar("T")


class DataError(RuntimeError):
    """A data set that cannot be had; the text is one sentence for the user."""


@dataclass(frozen=True)
class Prompt:
    """A conversation's user turns; `params` are further arguments of `SamplingParams`."""

    set: str
    id: str
    turns: tuple[str, ...]
    params: Row = field(default_factory=dict)


def load_jsonl(path: Path, samples: int | None = None) -> list[Prompt]:
    """Prompts from a file of JSON lines: own ones, or a file of Spec-Bench or SPEED-Bench.

    A row has `prompt` (a text), `turns` (texts), or `messages` (of which the user's count). Its set
    is its `domain` or `category`, or the file's name; `samples` are taken evenly from each. Its
    `params` are further arguments of `SamplingParams`.

    Raises:
        DataError: the file cannot be read, or a row has no prompt.
    """
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    except (OSError, json.JSONDecodeError) as error:
        raise DataError(f"{path.name} is no file of JSON lines: {error}") from error
    by_set: dict[str, list[Prompt]] = {}
    for number, row in enumerate(rows):
        name = str(row.get("domain") or row.get("category") or path.stem)
        found = row.get("id", row.get("question_id", number))
        prompt = Prompt(name, str(found), _turns(row, path, number), row.get("params", {}))
        by_set.setdefault(name, []).append(prompt)
    return [prompt for own in by_set.values() for prompt in spread(own, samples)]


def _turns(row: Row, path: Path, number: int) -> tuple[str, ...]:
    if "messages" in row:
        texts = [message["content"] for message in row["messages"] if message["role"] == "user"]
    else:
        given = row.get("turns", row.get("prompt"))
        texts = [given] if isinstance(given, str) else given
    if not texts:
        raise DataError(f'{path.name}: row {number} has no "prompt", "turns" or "messages"')
    return tuple(texts)


def spread(prompts: Sequence[T], samples: int | None) -> Iterable[T]:
    """`samples` of them, evenly spaced; all without a number."""
    count = len(prompts) if samples is None else min(samples, len(prompts))
    return (prompts[i * len(prompts) // count] for i in range(count))
