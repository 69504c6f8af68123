# SPDX-License-Identifier: Apache-2.0
"""Results as JSON lines, appended as soon as they are there.

A file has rows of these kinds:

- `run`: the settings and the provenance of a start of the command; later rows belong to it
- `round`: what one method did in one round, see `Round` and `rounds.summary`
- `start`: the seconds in which an engine was built
- `gap`: a set or an engine that could not be had, and why
- `judged`: whether the first difference of a reply from plain decoding's is a near-tie

The file survives a kill: a last line that was not finished is dropped, and what is there is not
decoded again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

Row = dict[str, Any]
# Settings that a file's rounds must share.
_SAME = ("target", "drafter", "tokens", "seed", "dtype", "raw", "ignore_eos", "round")


class StoreError(RuntimeError):
    """A results file that does not fit the command; the text is one sentence for the user."""


class Round(NamedTuple):
    """The prompts that every engine decodes before the next ones begin, by their number."""

    temperature: float
    concurrency: int
    set: str
    turn: int
    number: int

    @classmethod
    def of(cls, row: Row) -> Round:
        return cls(*(row[name] for name in cls._fields))


def read_rows(path: Path) -> list[Row]:
    """The finished lines of a file. Raises StoreError: it is no results file."""
    try:
        lines = path.read_text().splitlines(keepends=True)
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
    except (OSError, ValueError) as error:
        raise StoreError(f"{path.name} is no results file: {error}") from error
    if rows and rows[0].get("kind") != "run":
        raise StoreError(f"{path.name} is no results file: its first line is no run")
    return rows


class Store:
    """A results file that is open for appending.

    Args:
        path: None to keep the rows in memory only.

    Raises StoreError: the file's settings differ.
    """

    def __init__(self, path: Path | None, settings: Row, header: Row) -> None:
        self.rows: list[Row] = []
        self._path = path
        if path is not None and path.exists():
            self.rows = read_rows(path)
            for row in self.of_kind("run"):
                _compare(path, row["settings"], settings)
            whole = "".join(json.dumps(row) + "\n" for row in self.rows)
            path.write_text(whole)  # without a line that was not finished
        self.append({"kind": "run", "settings": settings, **header})

    def append(self, *rows: Row) -> None:
        self.rows += rows
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write("".join(json.dumps(row) + "\n" for row in rows))

    def of_kind(self, kind: str) -> Iterable[Row]:
        return (row for row in self.rows if row["kind"] == kind)


def _compare(path: Path, before: Row, now: Row) -> None:
    for name in _SAME:
        if before.get(name) != now.get(name):
            raise StoreError(
                f"{path.name} was made with {name}={before.get(name)!r}, not {now.get(name)!r}: "
                "choose another --out"
            )
