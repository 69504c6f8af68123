# SPDX-License-Identifier: Apache-2.0
"""Recordings, costs from files, and the length that a chain would have had."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import RESULTS
from benchmarks.probes import SeenTree
from benchmarks.replay.costs import measured, paper_a100
from benchmarks.replay.recording import load_recording


@pytest.mark.parametrize(
    ("path", "chain"),
    [([0], 0), ([0, 1, 2], 2), ([0, 1, 4], 1), ([0, 3], 0)],
    ids=["nothing accepted", "a chain", "leaves at depth 2", "leaves at once"],
)
def test_the_length_that_a_chain_would_have_had_accepted(path: list[int], chain: int) -> None:
    # 1 and 3 below the root, 2 and 4 below 1: best children are 1 and 2.
    tokens, parents, scores = [10, 11, 12, 13], [0, 1, 0, 1], [-0.1, -0.2, -2.0, -3.0]
    seen = SeenTree(0, 1, 9, tokens, parents, scores, num_verified=4, path=path, emitted=[0])
    assert seen.chain_length() == chain
    assert seen.accepted == len(path) - 1


def test_measured_costs_are_read() -> None:
    """At a point that was measured they are the measurement, within what smoothing changes."""
    path = RESULTS / "gpu" / "4B-h100-profile.json"
    costs, given = measured(path, 600), json.loads(path.read_text())
    assert costs.forward_ms[512] == pytest.approx(dict(given["forward"])[512], rel=0.05)
    assert (np.diff(costs.tree_step_ms(4)) >= 0).all()
    assert costs.draft_ms[1] == pytest.approx(dict(given["drafter"])[1], rel=0.05)


def test_the_papers_points() -> None:
    costs = paper_a100(128).tree_step_ms(1)
    assert len(costs) == 129
    # The paper's 22.0 ms at 32 nodes and 55.9 ms at 1024, with the drafter's 3.06 ms on top.
    assert costs[32] == pytest.approx(25.06, abs=0.1)
    assert costs[128] == pytest.approx(25.06 + 96 * 33.9 / 992, abs=0.1)


def test_another_file_is_refused_by_name(tmp_path: Path) -> None:
    for text in ("{}", "notes", '{"forward": [[1, 2.0]]}'):
        (tmp_path / "costs.json").write_text(text)
        with pytest.raises(ValueError, match=r"costs\.json"):
            measured(tmp_path / "costs.json", 8)


def test_every_position_of_a_recording_has_a_step_and_what_follows_it() -> None:
    for path in (RESULTS / "recordings").glob("*.npz"):
        found = load_recording(path)
        for request in range(len(found.request_ids)):
            own = found.step_positions[found.step_requests == request]
            assert own.tolist() == list(range(1, len(own) + 1)), path


def test_another_format_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "old.npz", version=np.int32(1))
    with pytest.raises(ValueError, match="no recording of format 2"):
        load_recording(tmp_path / "old.npz")
