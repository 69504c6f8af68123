# SPDX-License-Identifier: Apache-2.0
"""Results as JSON lines: one per response, appended as soon as it is finished.

A file has rows of these kinds:

- `run`: the settings and the provenance of a start of the command; later rows belong to it
- `response`: see `Key` and `benchmarks.harness.driver.Response`;
  those with the same `round` were decoded by engines in turn
- `gap`: a set, an engine or an engine on a set that could not be had, and why
- `judged`: whether the first difference of a response from plain decoding's is a near-tie
- `replayed`: a policy that was replayed on recorded drafts, by set and temperature

The file survives a kill: a last line that was not finished is dropped, and what is there is not
decoded again.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

Row = dict[str, Any]
# Settings that a file's responses must share.
_SAME = ("target", "drafter", "eagle3", "tokens", "seed", "dtype", "raw", "ignore_eos")


class StoreError(RuntimeError):
    """A results file that does not fit the command; the text is one sentence for the user."""


class Key(NamedTuple):
    """What makes a response unique on a machine."""

    method: str
    temperature: float
    concurrency: int
    set: str
    id: str
    turn: int

    @classmethod
    def of(cls, row: Row) -> Key:
        return cls(*(row[name] for name in cls._fields))


def read_rows(path: Path) -> Iterator[Row]:
    """The finished lines of a file. Raises StoreError: it is no results file."""
    with path.open("rb") as file:
        for number, line in enumerate(file):
            if line.endswith(b"\n"):
                try:
                    row = json.loads(line)
                except ValueError:
                    row = None
                if not isinstance(row, dict) or (number == 0 and row.get("kind") != "run"):
                    raise StoreError(f"{path.name} is no results file: see line {number + 1}")
                yield row


class Store:
    """A results file that is open for appending, by one process at a time.

    Raises StoreError: another process writes to the file, or its settings differ.
    """

    def __init__(self, path: Path, settings: Row, header: Row) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise StoreError(f"another process writes to {path.name}: wait for it") from None
        try:
            self.rows = list(read_rows(path))
            for row in self.rows:
                if row["kind"] == "run":
                    self._compare(path, row["settings"], settings)
        except StoreError:
            self._file.close()
            raise
        self._drop_torn_line()
        self.append({"kind": "run", "settings": settings, **header})

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, *rows: Row) -> None:
        """Write rows at once; they are in the file when this returns."""
        self.rows += rows
        text = "".join(json.dumps(row) + "\n" for row in rows)
        os.write(self._file.fileno(), text.encode())

    def responses(self) -> dict[Key, Row]:
        """The first response of each key; plain decoding has one in each of its rounds."""
        found: dict[Key, Row] = {}
        for row in self.rows:
            if row["kind"] == "response":
                found.setdefault(Key.of(row), row)
        return found

    def of_kind(self, kind: str) -> Iterable[Row]:
        return (row for row in self.rows if row["kind"] == kind)

    def _drop_torn_line(self) -> None:
        size = self._file.seek(0, os.SEEK_END)
        self._file.seek(0)
        data = self._file.read()
        whole = data.rfind(b"\n") + 1
        if whole < size:
            os.ftruncate(self._file.fileno(), whole)

    def _compare(self, path: Path, before: Row, now: Row) -> None:
        for name in _SAME:
            if before.get(name) != now.get(name):
                raise StoreError(
                    f"{path.name} was made with {name}={before.get(name)!r}, not "
                    f"{now.get(name)!r}: choose another --out"
                )
