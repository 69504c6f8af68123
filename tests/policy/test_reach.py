# SPDX-License-Identifier: Apache-2.0
"""How deep the next draft reaches."""

import numpy as np
from vllm_bastion.policy.reach import DraftReach

DEPTH = 15


def _observe(reach: DraftReach, **deepest: int) -> None:
    """Trees of slots named s0, s1 ... are verified."""
    slots = np.array([int(name[1:]) for name in deepest])
    reach.observe(slots, np.array(list(deepest.values())))


def _of(reach: DraftReach, *slots: int) -> int:
    return reach.of(np.array(slots))


def test_a_draft_reaches_beyond_the_last_tree():
    for deepest in range(DEPTH + 1):
        reach = DraftReach(1, DEPTH)
        _observe(reach, s0=deepest)
        assert min(deepest + 2, DEPTH) <= _of(reach, 0) <= DEPTH


def test_it_shrinks_by_one_position_a_tree_and_grows_at_once():
    reach = DraftReach(1, DEPTH)
    _observe(reach, s0=DEPTH)
    seen = []
    for _ in range(20):
        _observe(reach, s0=1)
        seen.append(_of(reach, 0))
    assert seen[:4] == [14, 13, 12, 11]
    assert seen[-1] == 3
    _observe(reach, s0=8)
    assert _of(reach, 0) == 14


def test_a_tree_that_fills_its_reach_reaches_the_whole_block_in_a_few_steps():
    reach = DraftReach(1, DEPTH)
    _observe(reach, s0=0)
    steps = 0
    while _of(reach, 0) < DEPTH:
        _observe(reach, s0=_of(reach, 0))
        steps += 1
    assert steps <= 4


def test_a_batch_reaches_as_deep_as_its_deepest_request():
    reach = DraftReach(3, DEPTH)
    _observe(reach, s0=1, s1=6)
    assert _of(reach, 0) == 3
    assert _of(reach, 0, 1) == _of(reach, 1) == 11


def test_a_new_request_drafts_the_whole_block_first():
    reach = DraftReach(3, DEPTH)
    _observe(reach, s0=2, s1=4)
    assert _of(reach, 0, 1) == 8
    assert _of(reach, 0, 1, 2) == DEPTH
    reach.restart(0)
    assert _of(reach, 0) == DEPTH
    _observe(reach, s0=1)
    assert _of(reach, 0) == 3
