# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the end-to-end tests, and the result table at the end of a session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.engine import provenance
from tests.e2e.compare import Comparison, Tally
from tests.e2e.engines import ROOT, Runner

HERE = Path(__file__).parent
RESULTS = ROOT / "benchmarks" / "results" / "lossless"
_TALLY = pytest.StashKey[Tally]()
_ENGINES = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_TALLY] = Tally()


@pytest.fixture(scope="session")
def runner(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[Runner]:
    """Runs engines in processes of their own; what has run once is kept."""
    made = Runner(tmp_path_factory.mktemp("engines"))
    yield made
    pytestconfig.stash[_ENGINES] = f"{len(made.cpu_s)} engines, {sum(made.cpu_s):.0f} s of CPU"


@pytest.fixture(scope="session")
def compare(runner: Runner, pytestconfig: pytest.Config) -> Comparison:
    """Compares runs with plain ones and counts into the session's result table."""
    return Comparison(runner, pytestconfig.stash[_TALLY])


@pytest.fixture(scope="session", autouse=True)
def _table(request: pytest.FixtureRequest) -> Iterator[None]:
    """Write the result table where the whole matrix was run."""
    yield
    config = request.config
    tally = config.stash[_TALLY]
    narrowed = config.option.markexpr or config.option.keyword or request.session.testsfailed
    files = {item.path for item in request.session.items}
    if tally.rows and not narrowed and files >= set(HERE.glob("test_*.py")):
        tally.write(RESULTS, {**provenance(), "command": "make test-full"})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what was compared."""
    tally = terminalreporter.config.stash[_TALLY]
    if tally.rows:
        terminalreporter.section("token identity with plain vLLM decoding")
        terminalreporter.write(tally.markdown())
        terminalreporter.write_line(terminalreporter.config.stash.get(_ENGINES, ""))
