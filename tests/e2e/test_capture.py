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
LENGTH = 128


@pytest.fixture(scope="module")
def probed(runner: Runner) -> list[dict[str, Any]]:
    """What one engine answers while three requests are decoding, and when they have ended."""
    # The probe asks for two more.
    engine = Engine(max_num_seqs=5, max_model_len=LENGTH, eager=True).with_bastion(63)
    watched = {"setup": ["tests.e2e.capture_probe:watch"], "probe": "tests.e2e.capture_probe:every"}
    run = runner.run(engine, [cases.greedy(1, tokens=4)], **watched)
    found: list[dict[str, Any]] = run["batches"][0]["probed"]
    assert len(found) == 2
    return found


def test_full_graphs_capture_the_mask(probed: list[dict[str, Any]]) -> None:
    seen = probed[1]["captured"]
    # A PIECEWISE graph holds no attention: a batch without trees uses vLLM's own kernel there.
    masked = {"trees": True, "piecewise": False, "plain": False}
    assert {one["kind"]: one["masked"] for one in seen} == masked
    # The drafter builds its own metadata, though the attention groups contain its layers as well.
    assert all(one["bound"] and not one["others"] for one in seen)


def test_plain_steps_have_graphs_of_their_own(probed: list[dict[str, Any]]) -> None:
    """Up to the largest size that holds no more rows than there can be requests."""
    graphs = probed[1]["graphs"]
    longest, requests = 64, 5
    sizes = [16, 8, 4, 2, 1]
    own = [[(size, 1)] * (size <= requests) + [(size, longest)] for size in sizes]
    assert graphs["captured"] == [list(one) for pair in own for one in pair]
    for (_, rows, most), found in graphs["chosen"]:
        size = min(size for size in sizes if size >= rows)
        assert found == [size, 1 if most == 1 and size <= requests else longest]


def test_warm_up_and_the_profile_run_the_tree_kernel(probed: list[dict[str, Any]]) -> None:
    """Also without graphs, and vLLM's own dummy batches do not, before or after."""
    assert probed[1]["dummies"] == {"tree step": [True], "vLLM's own": [False]}


def test_no_request_waits_for_the_drafters_input_kernel(probed: list[dict[str, Any]]) -> None:
    """It is compiled once per block size; every size a batch can need is launched in advance."""
    # Queries have up to 128 tokens, the drafter's block 16.
    assert {32, 64, 128, 256} <= set(probed[0]["input blocks"])


def test_an_idle_rank_runs_one_row(probed: list[dict[str, Any]]) -> None:
    """vLLM runs N + 1. The drafter's part has collectives too."""
    assert probed[0]["idle rank"] == {"rows": 1, "requests": 1, "drafts": True}


def test_no_request_of_the_warm_up_leaves_the_models_length(probed: list[dict[str, Any]]) -> None:
    """Four times N + 1 rows and three more: 128 hold trees of 30 nodes."""
    assert probed[0]["warm-up"]["drafts"] == 30
    assert probed[0]["warm-up"]["longest"] <= LENGTH
