# SPDX-License-Identifier: Apache-2.0
"""Engines that decode nothing, in place of those that the benchmarks start."""

from __future__ import annotations

import pytest
from fake_engines import Host

from benchmarks.e2e import rounds


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    host = Host()
    monkeypatch.setattr(rounds, "begun", host.begun)
    return host
