# SPDX-License-Identifier: Apache-2.0
"""The file of answers, which is rewritten with every part that a question tells."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

ANSWERED, INTERRUPTED, FAILED, UNASKED = "answered", "interrupted", "failed", "not asked"


class Answers:
    """All calls and answers so far, in a file that is always valid JSON.

    `calls`: where, when and on what each call ran. `questions`: by name, `status`, `seconds`,
    `error` and `rows`; each row has its `part` and the number of its `call`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        found = json.loads(path.read_text()) if path.exists() else {"calls": [], "questions": {}}
        self.calls: list[dict[str, Any]] = found["calls"]
        self.questions: dict[str, dict[str, Any]] = found["questions"]

    def status(self, name: str) -> str:
        """How far a question has come."""
        return str(self.questions.get(name, {}).get("status", UNASKED))

    def known(self, name: str) -> frozenset[str]:
        """The parts that it has told."""
        return frozenset(row["part"] for row in self.questions.get(name, {}).get("rows", ()))

    def begin_call(self, provenance: dict[str, Any]) -> None:
        """Rows that follow belong to this call."""
        self.calls.append(provenance)
        self._write()

    def begin(self, name: str) -> None:
        """A question is being asked; should everything be killed, it has been interrupted."""
        entry = self.questions.setdefault(name, {"seconds": 0.0, "rows": []})
        entry |= {"status": INTERRUPTED, "error": "the whole call ended"}
        self._write()

    def add(self, name: str, row: dict[str, Any]) -> None:
        """A part of its answer."""
        self.questions[name]["rows"].append({**row, "call": len(self.calls) - 1})
        self._write()

    def end(self, name: str, status: str, seconds: float, error: str = "") -> None:
        """It has been answered, or why not."""
        entry = self.questions[name]
        entry |= {"status": status, "seconds": round(entry["seconds"] + seconds, 1), "error": error}
        self._write()

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._path.with_suffix(".part")
        whole = {"calls": self.calls, "questions": self.questions}
        unfinished.write_text(json.dumps(whole) + "\n")
        os.replace(unfinished, self._path)
