# SPDX-License-Identifier: Apache-2.0
"""FULL graphs capture tree attention, whatever dummy batch they are captured with.

A graph is captured over a dummy batch without a tree and replayed for every later one, so it must
hold the kernel that reads the mask. No graph can be captured on a CPU, but vLLM's own preparation
of the batch to capture runs here.
"""

from __future__ import annotations

import pytest

from tests.e2e import cases
from tests.e2e.engines import Engine, Runner

pytestmark = pytest.mark.e2e


def test_full_graphs_capture_the_mask(runner: Runner) -> None:
    engine = Engine(max_num_seqs=2, eager=True).with_bastion(8)
    run = runner.run(engine, [cases.greedy(1, tokens=4)], probe="tests.e2e.capture_probe:captured")
    seen = run["batches"][0]["probed"]
    full = [one for one in seen if one["full"]]
    piecewise = [one for one in seen if not one["full"]]
    assert full and piecewise
    assert all(one["bound"] and one["masked"] for one in full)
    # A PIECEWISE graph holds no attention: a batch without trees uses vLLM's own kernel there.
    assert not any(one["masked"] for one in piecewise)
    # The drafter builds its own metadata, though the attention groups contain its layers as well.
    assert not any(one["others"] for one in seen)


def test_warm_up_and_calibration_run_the_tree_kernel(runner: Runner) -> None:
    """Also without graphs: warm-up and calibration run the kernels of a tree step."""
    engine = Engine(max_num_seqs=2, eager=True).with_bastion(8)
    run = runner.run(engine, [cases.greedy(1, tokens=2)], probe="tests.e2e.capture_probe:dummies")
    first = run["batches"][0]["probed"][0]
    assert first == {"tree step": [True], "vLLM's own": [False], "after": False}


def test_no_request_waits_for_the_drafters_input_kernel(runner: Runner) -> None:
    """It is compiled once per block size; every size a batch can need is launched in advance."""
    engine = Engine(max_num_seqs=2, eager=True).with_bastion(8)
    watched = {"setup": ["tests.e2e.input_blocks:watch"], "probe": "tests.e2e.input_blocks:seen"}
    run = runner.run(engine, [cases.greedy(1, tokens=4)], **watched)
    # Queries have up to 128 tokens, the drafter's block 16.
    assert {32, 64, 128, 256} <= set(run["batches"][0]["probed"][0])


def test_calibration_times_trees_over_their_context(runner: Runner) -> None:
    """Two requests, each a root and five nodes on 100 cached tokens, through the mask."""
    # Three requests are decoding when the probe asks for two more.
    engine = Engine(max_num_seqs=5, eager=True).with_bastion(8)
    probe = "tests.e2e.capture_probe:timed_trees"
    run = runner.run(engine, [cases.greedy(1, tokens=2)], probe=probe)
    root, trees = run["batches"][0]["probed"][:2]
    assert root["rows"] == [1, 1] and root["seq_lens"] == [101, 101]
    assert trees["rows"] == [6, 6] and trees["query_start_loc"] == [0, 6, 12]
    assert trees["seq_lens"] == [107, 107]
    assert trees["masked"] and trees["tails"] == [6, 6]
    # Requests with equal trees would share the experts of a mixture.
    assert len(set(root["tokens"])) == 2 and len(set(trees["tokens"])) == 12


@pytest.mark.parametrize(("nodes", "drafts"), [(8, 8), (63, 30)])
def test_no_request_of_the_warm_up_leaves_the_models_length(
    runner: Runner, nodes: int, drafts: int
) -> None:
    """Four times N + 1 rows and three more: 128 hold trees of 30 nodes."""
    engine = Engine(max_num_seqs=5, max_model_len=128, eager=True).with_bastion(nodes)
    probe = "tests.e2e.capture_probe:warm_up_lengths"
    run = runner.run(engine, [cases.greedy(1, tokens=2)], probe=probe)
    found = run["batches"][0]["probed"][0]
    assert found["drafts"] == drafts
    assert found["longest"] <= 128
