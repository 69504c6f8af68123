# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the end-to-end tests."""

from __future__ import annotations

import pytest

from tests.e2e.compare import Comparison
from tests.e2e.engines import Runner
from tests.e2e.report import TALLY


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Runner:
    """Runs engines, each configuration once per session."""
    folder = tmp_path_factory.getbasetemp()
    if hasattr(
        pytestconfig, "workerinput"
    ):  # one of pytest-xdist's processes: use the same folder as the others
        folder = folder.parent
    return Runner(folder / "engines", cpu_s=pytestconfig.stash[TALLY].cpu_s)


@pytest.fixture(scope="session")
def compare(runner: Runner, pytestconfig: pytest.Config) -> Comparison:
    """Compares runs with plain decoding and adds to the session's result table."""
    return Comparison(runner, pytestconfig.stash[TALLY])
