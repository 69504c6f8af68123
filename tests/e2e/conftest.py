# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the end-to-end tests."""

from __future__ import annotations

import pytest

from tests.e2e.compare import Comparison
from tests.e2e.engines import Runner
from tests.e2e.report import TALLY


@pytest.fixture(scope="session")
def compare(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Comparison:
    """Runs engines, each configuration once per session, and adds to the result table."""
    folder = tmp_path_factory.getbasetemp()
    if hasattr(pytestconfig, "workerinput"):  # pytest-xdist's processes share a folder
        folder = folder.parent
    return Comparison(folder / "engines", pytestconfig.stash[TALLY])


@pytest.fixture(scope="session")
def runner(compare: Comparison) -> Runner:
    """The same, for tests that compare nothing with plain decoding."""
    return compare
