# SPDX-License-Identifier: Apache-2.0
"""Placeholders are shared out so that no request lacks what another does not use."""

from __future__ import annotations

import numpy as np
from vllm_bastion.policy.shares import even_split, next_wanted, share_placeholders

GAMMA, NODES = 15, 63


def _array(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def test_an_even_split_hands_out_one_at_a_time_to_the_first_that_has_least() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        reqs = int(rng.integers(0, 12))
        limits = rng.integers(0, int(rng.integers(1, 30)), reqs).astype(np.int32)
        total = int(rng.integers(-2, 150))
        shares = [0] * reqs
        for _ in range(total):
            room = [r for r in range(reqs) if shares[r] < limits[r]]
            if room:
                shares[min(room, key=lambda r: (shares[r], r))] += 1
        assert even_split(total, limits).tolist() == shares


def test_random_steps_are_shared_within_their_bounds() -> None:
    rng = np.random.default_rng(0)
    for _ in range(500):
        reqs = int(rng.integers(0, 40))
        limits = rng.integers(0, NODES + 1, reqs).astype(np.int32)
        wanted = rng.integers(0, 2 * NODES, reqs).astype(np.int32)
        tokens, prompts = int(rng.integers(-5, 600)), int(rng.integers(0, 400))
        shares = share_placeholders(tokens, wanted, limits, prompts)
        first = np.minimum(wanted, limits)
        left = max(tokens, 0) - int(shares.sum())
        assert (shares >= 0).all() and (shares <= limits).all() and left >= 0
        # Prompts get all that they can use.
        assert left >= min(prompts, max(tokens, 0))
        # No token is left over that a tree could use.
        if left > prompts:
            assert (shares == limits).all()
        # A request that gets less than it wants gets as much as every other, up to one.
        short = shares < first
        if short.any():
            assert shares.max() <= shares[short].min() + 1


def test_a_tree_that_uses_its_share_gets_what_others_do_not_use() -> None:
    wanted, limits = _array(NODES, NODES, NODES), _array(NODES, NODES, NODES)
    seen = []
    for _ in range(4):
        shares = share_placeholders(96, wanted, limits, 0)
        seen.append(shares.tolist())
        # The first request verifies all its nodes, the others two each.
        nodes = np.minimum(shares, _array(NODES, 2, 2))
        wanted = _array(*(next_wanted(int(n), GAMMA) for n in nodes))
    assert seen[0] == [32, 32, 32]
    assert seen[-1][0] == 62 and min(seen[-1][1:]) >= 2 + GAMMA
