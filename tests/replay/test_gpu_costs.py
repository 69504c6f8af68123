# SPDX-License-Identifier: Apache-2.0
"""Lagged budgets with recorded drafts and the step costs of an H100."""

import pytest

from benchmarks import RESULTS
from benchmarks.replay.costs import from_profile
from benchmarks.replay.policies import Adaptive, Fixed, Plain
from benchmarks.replay.recording import load_recording
from benchmarks.replay.simulation import Corpus, Truth, simulate
from vllm_bastion.policy.cost.table import StepCostTable

NODES, LARGEST_GRAPH = 255, 512
# of a forward pass without a graph, by the host's launches (docs/numbers.md)
HOST_MS = 16.0


@pytest.fixture(scope="module")
def corpus():
    return Corpus(load_recording(RESULTS / "recordings" / "tiny.npz"), NODES, 0.0)


@pytest.mark.parametrize("batch, budgets", [(4, (16, 32, 64)), (15, (8, 16, 32))])
def test_lagged_budgets_keep_up_with_the_best_fixed_one(corpus, batch, budgets):
    """The profile does not know what steps beyond the graphs really take, and batches grow."""
    source = from_profile("H100", RESULTS / "gpu" / "4B-h100-profile.json", 16 * (NODES + 1))
    data = source.table.to_json()
    data["samples"] = [
        (LARGEST_GRAPH + 1, context, HOST_MS, reqs) if rows == 576
        else (rows, context, max(ms, HOST_MS) if rows > LARGEST_GRAPH else ms, reqs)
        for rows, context, ms, reqs in data["samples"]
    ]  # fmt: skip
    really = StepCostTable.from_json(data, source.calibrated)
    requests = corpus.interleaved() * (batch // 4)

    def seconds(policy):
        truth = Truth(really, noise=0.05, stalls=0.01)
        return simulate(corpus, policy, truth, requests=requests, batch=batch).ms / 1e3

    latency = source.latency("ema_table")
    adaptive = seconds(Adaptive(corpus, latency, max_nodes=NODES, timing="lagged"))
    fixed = min(seconds(Fixed(corpus, nodes)) for nodes in budgets)
    assert adaptive <= fixed / 0.99 and adaptive < 0.4 * seconds(Plain())
