# SPDX-License-Identifier: Apache-2.0
"""FULL graphs capture tree attention, and those of plain steps vLLM's.

A graph is captured over a dummy batch without a tree. One that is replayed for trees must hold the
kernel that reads the mask. No graph can be captured on a CPU, but vLLM's own dispatch and
preparation of the batch to capture run here.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e import cases
from tests.e2e.engines import Engine, Runner

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def probed(runner: Runner) -> dict[str, Any]:
    engine = Engine(max_num_seqs=5, max_model_len=128, eager=True).with_bastion(63)
    probe = "tests.e2e.capture_probe:at_the_end"
    run = runner.run(engine, [cases.greedy(1, tokens=4)], probe=probe)
    (found,) = run["batches"][0]["probed"]
    return dict(found)


def test_full_graphs_capture_the_mask(probed: dict[str, Any]) -> None:
    seen = probed["captured"]
    # A PIECEWISE graph holds no attention: a batch without trees uses vLLM's own kernel there.
    masked = {"trees": True, "piecewise": False, "plain": False}
    assert {one["kind"]: one["masked"] for one in seen} == masked
    # The drafter builds its own metadata, though the attention groups contain its layers as well.
    assert all(one["bound"] and not one["others"] for one in seen)


def test_plain_steps_have_graphs_of_their_own(probed: dict[str, Any]) -> None:
    """Also the largest batch, and a step whose nodes were trimmed; not one with a prompt."""
    graphs = probed["graphs"]
    longest, sizes, plain = 64, [16, 8, 4, 2, 1], [5, 4, 2, 1]
    captured = {(size, longest) for size in sizes} | {(size, 1) for size in plain}
    assert {tuple(one) for one in graphs["captured"]} == captured
    rows = [rows for rows, _ in graphs["captured"]]
    assert rows == sorted(rows, reverse=True)
    for (reqs, rows, scheduled), found in graphs["chosen"]:
        own = reqs == rows and scheduled != 0
        size = min(size for size in (plain if own else sizes) if size >= rows)
        assert found == [size, 1 if own else longest]
