# SPDX-License-Identifier: Apache-2.0
"""Plain decoding and the chain as candidates: taken up, held against noise, given up again."""

import itertools

import numpy as np

from vllm_bastion.controller import Budget
from vllm_bastion.modes import ModeSelector


def _budget(tokens, ms):
    return Budget(np.zeros(1, dtype=np.int32), tokens, ms)


def _steps(selector, count, tokens, tree_ms, plain_ms=10.0, reqs=1, chain=None, rng=None):
    """Drive an engine: a tree is offered exactly when the selector asked for one."""
    modes, wanted = [], selector.mode
    for _ in range(count):
        noise = 1.0 if rng is None else 1.0 + 0.2 * rng.standard_normal()
        tree = _budget(1 + (tokens * reqs - 1) * noise, tree_ms) if wanted == "tree" else None
        spine = chain if wanted in ("tree", "chain") else None
        wanted = selector.next_mode(reqs, plain_ms, tree, spine)
        modes.append(wanted)
    return modes


def test_a_paying_tree_is_never_left():
    modes = _steps(ModeSelector(), 500, 4.0, 15.0, rng=np.random.default_rng(0))
    assert set(modes) == {"tree"}


def test_a_losing_tree_is_left_and_seldom_tried():
    modes = _steps(ModeSelector(), 3000, 2.0, 30.0, rng=np.random.default_rng(1))
    assert modes.index("plain") <= 12
    late = modes[1000:]
    assert 0 < late.count("tree") / len(late) < 0.02


def test_trees_come_back_when_they_pay_again():
    selector = ModeSelector()
    _steps(selector, 400, 1.2, 20.0)
    assert selector.mode == "plain"
    modes = _steps(selector, 300, 6.0, 20.0)
    assert modes[-1] == "tree" and selector.mode == "tree"
    # the longest interval, and the probe itself
    assert modes.index("tree") <= 256 and set(modes[modes.index("tree") :]) == {"tree"}


def test_a_tie_within_the_margin_changes_nothing():
    rng = np.random.default_rng(2)
    selector = ModeSelector()
    assert set(_steps(selector, 300, 2.0, 20.1, rng=None)) == {"tree"}
    assert "plain" not in _steps(selector, 50, 2.0, 20.2, rng=rng)[:1]


def test_no_flapping_near_the_break_even():
    modes = _steps(ModeSelector(), 5000, 2.0, 20.5, rng=np.random.default_rng(3))
    changes = sum(a != b for a, b in itertools.pairwise(modes))
    # probes account for two changes each; the intervals leave few of them
    assert changes <= 80


def test_an_overstating_drafter_is_found_out():
    selector, wanted = ModeSelector(), "tree"
    modes = []
    for _ in range(200):
        # promises five tokens in 20 ms, gives one
        tree = _budget(5.0, 20.0) if wanted == "tree" else None
        if tree:
            selector.observe(tree, 1, 1)
        wanted = selector.next_mode(1, 10.0, tree)
        modes.append(wanted)
    assert selector.kappa < 0.1
    assert modes.count("plain") > 120


def test_kappa_tracks_what_is_realised():
    selector = ModeSelector()
    for _ in range(400):
        selector.observe(_budget(2 * 4.0, 20.0), 2, 2 + 9)
    assert 1.45 < selector.kappa < 1.55


def test_the_chain_is_taken_when_it_is_cheaper():
    selector = ModeSelector(chain=True)
    chain = _budget(3.8, 15.0)
    modes = _steps(selector, 100, 4.0, 20.0, chain=chain)
    assert modes[-1] == "chain"
    # not a candidate unless asked for
    assert set(_steps(ModeSelector(), 100, 4.0, 20.0, chain=chain)) == {"tree"}


def test_a_losing_chain_gives_way_to_plain_decoding():
    selector = ModeSelector(chain=True)
    _steps(selector, 60, 4.0, 20.0, chain=_budget(3.8, 15.0))
    assert selector.mode == "chain"
    modes = _steps(selector, 100, 1.1, 20.0, chain=_budget(1.1, 15.0))
    assert modes[-1] == "plain"


def test_a_batch_that_shrinks_asks_again_soon():
    selector = ModeSelector()
    _steps(selector, 600, 1.1, 40.0, reqs=32)
    assert selector.mode == "plain"
    modes = _steps(selector, 12, 4.0, 12.0, reqs=1)
    assert "tree" in modes[:3] and modes[-1] == "tree"
