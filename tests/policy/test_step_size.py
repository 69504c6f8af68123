# SPDX-License-Identifier: Apache-2.0
"""Lagged sizes: graphs, prompts and batches that change, against the costs of the step."""

import numpy as np
import pytest
from vllm_bastion.policy.step_size import StepSize

GRAPHS = np.array([1, 2, 4, *range(8, 513, 8)])
# In a graph a row adds 10 us; without one the host takes 20 ms.
COST = np.where(np.arange(4097) <= 512, 6.0 + 0.01 * np.arange(4097), 20.0).astype(np.float32)


def told(nodes, trees, tokens=None):
    size = StepSize()
    size.observe(nodes, trees, 3.0 * trees if tokens is None else tokens)
    return size


def test_a_step_like_the_last_one_takes_what_its_scores_asked_for():
    assert told(48, 4).choose(4, 4, 4, 4096, COST, GRAPHS) == 48
    assert told(48, 4).choose(4, 4, 4, 30, COST, GRAPHS) == 30
    assert told(0, 4).choose(4, 4, 4, 4096, COST, GRAPHS) == 0


def test_one_request_more_does_not_leave_the_graphs():
    """497 nodes of 15 requests fill the largest graph; with 16 they would be 513 rows."""
    nodes = told(497, 15).choose(16, 16, 16, 4096, COST, GRAPHS)
    assert nodes == 496


def test_a_prompt_beside_trees_does_not_push_them_out_of_the_graphs():
    """4 requests, 250 nodes and a prompt of 400 rows would be 654."""
    nodes = told(250, 4).choose(4, 5, 404, 4096, COST, GRAPHS)
    assert 404 + nodes <= 512 and nodes > 0


def test_a_prompt_that_leaves_the_graphs_anyway_costs_no_nodes():
    assert told(250, 4).choose(4, 5, 704, 4096, COST, GRAPHS) > 200


def test_nodes_that_cost_more_beside_a_prompt_are_fewer():
    linear = (6.0 + 0.01 * np.arange(4097)).astype(np.float32)
    steep = linear.copy()
    steep[300:] += 0.5 * np.arange(len(steep) - 300)
    none = np.zeros(0, dtype=np.int64)
    assert told(64, 4).choose(4, 5, 304, 4096, linear, none) > told(64, 4).choose(
        4, 5, 304, 4096, steep, none
    )


def test_a_batch_that_grew_keeps_its_nodes_and_one_that_shrank_its_share():
    none = np.zeros(0, dtype=np.int64)
    assert told(90, 1).choose(15, 15, 15, 4096, COST[:500], none) == 90
    assert told(90, 6).choose(2, 2, 2, 4096, COST[:500], none) == 30


@pytest.mark.parametrize("graphs", [GRAPHS, np.zeros(0, dtype=np.int64)])
def test_the_first_trees_are_no_more_than_one_whole_tree(graphs):
    assert StepSize().choose(4, 4, 4, 4 * 255, COST, graphs) == 255
    assert StepSize().choose(0, 4, 4, 0, COST, graphs) == 0
    # Nor more than the cost table knows.
    assert told(90, 1).choose(1, 1, 1, 255, COST[:41], graphs) <= 39
