# SPDX-License-Identifier: Apache-2.0
"""The result table: the comparisons of a test session, over all of its processes.

The functions are pytest hooks. `tests/conftest.py` imports them, because pytest-xdist's main
process, which adds up the counts of the others, reads no other conftest.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "benchmarks" / "results" / "lossless"


@dataclass
class Row:
    case: str
    engine: str
    requests: int = 0
    tokens: int = 0
    mismatches: int = 0
    near_ties: int = 0

    def add(self, other: Row) -> None:
        for key in ("requests", "tokens", "mismatches", "near_ties"):
            setattr(self, key, getattr(self, key) + getattr(other, key))


@dataclass
class Tally:
    """All comparisons of a session."""

    rows: list[Row] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)  # of every engine that ran
    files: list[str] = field(default_factory=list)  # of the collected tests

    def row(self, case: str, engine: str) -> Row:
        for row in self.rows:
            if (row.case, row.engine) == (case, engine):
                return row
        self.rows.append(Row(case, engine))
        return self.rows[-1]

    def merge(self, rows: list[dict[str, Any]], cpu_s: list[float], files: list[str]) -> None:
        for given in rows:
            row = Row(**given)
            self.row(row.case, row.engine).add(row)
        self.cpu_s += cpu_s
        self.files = sorted({*self.files, *files})

    def table(self) -> list[Row]:
        total = Row("total", "")
        for row in self.rows:
            total.add(row)
        return [*sorted(self.rows, key=lambda row: (row.case, row.engine)), total]

    def markdown(self) -> str:
        lines = [
            "| Case | Engine | Requests | Tokens | Mismatches | of them near-ties |",
            "|---|---|---:|---:|---:|---:|",
        ]
        for row in self.table():
            lines.append(f"| {' | '.join(str(cell) for cell in asdict(row).values())} |")
        return "\n".join(lines) + "\n"

    def write(self, stem: Path, source: dict[str, Any]) -> None:
        from tests.e2e.compare import NEAR_TIE

        title = "# Token identity with plain vLLM decoding\n\n"
        made = ", ".join(f"{key} {value}" for key, value in source.items())
        note = (
            "Written by `make test-full`. A near-tie is a mismatch where the target's two best "
            f"logits differ by less than {NEAR_TIE:g}; any other mismatch fails the test.\n\n"
            f"Made with: {made}.\n\n"
        )
        stem.with_suffix(".md").write_text(title + note + self.markdown())
        report = {"provenance": source, "rows": [asdict(row) for row in self.table()]}
        stem.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")


TALLY = pytest.StashKey[Tally]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[TALLY] = Tally()


def pytest_collection_finish(session: pytest.Session) -> None:
    session.config.stash[TALLY].files = sorted({str(item.path) for item in session.items})


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    counted = getattr(node, "workeroutput", {}).get("tally")
    if counted:
        node.config.stash[TALLY].merge(**counted)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the counts to the main process, which writes the table if the whole matrix ran."""
    config = session.config
    tally = config.stash[TALLY]
    if hasattr(config, "workeroutput"):
        config.workeroutput["tally"] = asdict(tally)
        return
    narrowed = config.option.markexpr or config.option.keyword or session.testsfailed
    every = {str(path) for path in HERE.glob("test_*.py")}
    if tally.rows and not narrowed and every <= set(tally.files):
        from benchmarks.provenance import provenance

        tally.write(RESULTS, provenance("make test-full"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    tally = terminalreporter.config.stash[TALLY]
    if tally.rows:
        terminalreporter.section("token identity with plain vLLM decoding")
        terminalreporter.write(tally.markdown())
        engines = f"{len(tally.cpu_s)} engines, {sum(tally.cpu_s):.0f} s of CPU"
        terminalreporter.write_line(engines)
