# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.compare` over engines that decode nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_engines import Host

from benchmarks.compare.__main__ import SET_UPS, main
from helpers import ROOT


def test_a_line_for_each_load_has_the_ratios_of_both_starts(
    host: Host,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("OMP_NUM_THREADS", "VLLM_CACHE_ROOT"):  # which the command sets
        monkeypatch.setenv(name, "1")
    host.seconds = {"plain": 0.4, "ours": 0.1, "theirs": 0.2}
    main([str(ROOT), "--seconds", "0.02", "--only", "tiny", "--out", str(tmp_path)])
    order = ["ours", "theirs", "plain"]
    assert host.started == [(name, 16) for name in [*order, *reversed(order)]]
    table = (tmp_path / "table.md").read_text()
    assert table == capsys.readouterr().out
    lines = [line for line in table.splitlines() if "2.000, 2.000" in line]
    assert len(lines) == len(SET_UPS[0].loads) * 2, "with long and with short replies"
    for line in lines:
        assert "| 2.000 | 2.000, 2.000 | 4.000 | 2.000 | 1.00, 1.0 | 1.00, 1.0 |" in line
    assert "starts: bastion 1 s" in table and "gap" not in table
