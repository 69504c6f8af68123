# SPDX-License-Identifier: Apache-2.0
"""When the gate drafts: per request, with trials while trees do not pay, and without flapping."""

import itertools

import numpy as np

from vllm_bastion.policy.gate import DraftGate

PLAIN_MS = 10.0


class Engine:
    """Drives a gate as the engine does: a tree is verified if and only if the gate asked for it.

    accepted: accepted over promised draft tokens.
    """

    def __init__(self, tree_ms, accepted=1.0, seed=0):
        self.gate = DraftGate()
        self.cost = np.full(2000, tree_ms, dtype=np.float32)
        self.accepted = accepted
        self.rng = np.random.default_rng(seed)
        self.drafted = {}

    def arrive(self, requests):
        """New requests; the last step of their prompts decides whether they start with a tree."""
        for name in requests:
            self.gate.forget(name)
        self.drafted = set(requests) if self.gate.draft(requests, self.cost, PLAIN_MS) else set()

    def run(self, worth, steps, noise=0.2):
        """Run steps. Returns for each whether it had trees.

        worth: request -> draft tokens that a tree of 16 nodes promises.
        """
        names, seen = list(worth), []
        for _ in range(steps):
            trees = [name for name in names if name in self.drafted]
            seen.append(bool(trees))
            if trees:
                gains = [
                    max(0.0, worth[n] * (1 + noise * self.rng.standard_normal())) for n in trees
                ]
                self.gate.observe_trees(trees, gains, [16] * len(trees))
                self.gate.observe_step(sum(gains), self.accepted * sum(gains))
            again = self.gate.draft(names, self.cost, PLAIN_MS)
            self.drafted = set(names) if again else set()
        return seen


def test_trees_that_pay_never_stop():
    engine = Engine(tree_ms=15.0)
    engine.arrive([0])
    assert all(engine.run({0: 3.0}, 500))


def test_trees_that_do_not_pay_stop_at_once_and_are_seldom_tried():
    engine = Engine(tree_ms=30.0)
    engine.arrive([0])
    seen = engine.run({0: 1.0}, 3000)
    assert seen[0] and not seen[2]
    # a step with a tree takes three plain ones; the waits grow from 48 steps to 768
    assert 2 <= sum(seen[1000:]) <= 8


def test_trees_come_back_when_they_pay_again():
    engine = Engine(tree_ms=20.0)
    engine.arrive([0])
    assert not engine.run({0: 0.2}, 400)[-1]
    seen = engine.run({0: 5.0}, 600)
    first = seen.index(True)
    assert first <= 16 * 2 * 16 and all(seen[first:])


def test_a_new_request_gets_a_tree_after_a_hopeless_one():
    engine = Engine(tree_ms=30.0)
    for name in range(20):
        engine.arrive([name])
        assert engine.run({name: 0.5}, 40)[0]
    engine.arrive([99])
    assert all(engine.run({99: 5.0}, 40))


def test_a_good_request_is_judged_by_itself():
    engine = Engine(tree_ms=30.0)
    shares = {}
    for name in range(40):
        good = name % 4 == 0
        engine.arrive([name])
        seen = engine.run({name: 4.0 if good else 1.0}, 20)
        shares.setdefault(good, []).append(sum(seen) / 20)
    assert np.mean(shares[True]) > 0.9
    assert np.mean(shares[False]) < 0.2


def test_a_reused_request_slot_starts_anew():
    engine = Engine(tree_ms=30.0)
    engine.arrive([0])
    engine.run({0: 0.5}, 40)
    engine.arrive([0])
    assert engine.run({0: 5.0}, 1) == [True]


def test_one_newcomer_does_not_make_a_full_batch_draft():
    engine = Engine(tree_ms=30.0)
    names = list(range(32))
    engine.arrive(names)
    engine.run(dict.fromkeys(names, 0.5), 20)
    names[7] = 100
    assert not engine.gate.draft(names, engine.cost, PLAIN_MS)
    assert engine.gate.draft([100], engine.cost, PLAIN_MS)


def test_a_batch_drafts_by_its_sum():
    engine = Engine(tree_ms=20.0)
    engine.arrive([0, 1, 2, 3])
    # break-even is one accepted token each: one request carries the other three
    assert all(engine.run({0: 8.0, 1: 0.1, 2: 0.1, 3: 0.1}, 100))
    engine = Engine(tree_ms=20.0)
    engine.arrive([0, 1, 2, 3])
    assert not any(engine.run({0: 2.0, 1: 0.1, 2: 0.1, 3: 0.1}, 30)[6:])


def test_no_flapping_at_the_break_even():
    engine = Engine(tree_ms=20.5, seed=3)
    engine.arrive([0])
    seen = engine.run({0: 1.0}, 5000)
    assert sum(a != b for a, b in itertools.pairwise(seen)) <= 100


def test_a_tree_without_a_node_worth_verifying_counts():
    gate, cost = DraftGate(), np.full(100, 30.0, dtype=np.float32)
    assert gate.draft([0], cost, PLAIN_MS)
    gate.observe_trees([0], [0.0], [0])
    assert not gate.draft([0], cost, PLAIN_MS)


def test_a_drafter_that_overstates_itself_is_corrected():
    # promises four tokens in two plain steps' time, and gives none
    engine = Engine(tree_ms=20.0, accepted=0.0)
    engine.arrive([0])
    seen = engine.run({0: 4.0}, 200)
    assert engine.gate.kappa < 0.3
    assert sum(seen) < 20


def test_a_first_tree_that_is_not_verified_yet_counts_as_average():
    # As in lagged timing, where the host learns of a tree a step after it was verified.
    cost, gate = np.full(100, 30.0, dtype=np.float32), DraftGate()
    assert gate.draft([0], cost, PLAIN_MS)
    assert gate.draft([0], cost, PLAIN_MS), "nothing is known of any tree yet"
    gate.observe_trees([0], [0.5], [16])
    assert not gate.draft([0], cost, PLAIN_MS)
    gate.forget(1)
    assert gate.draft([1], cost, PLAIN_MS)
    assert not gate.draft([1], cost, PLAIN_MS), "first trees have not paid so far"
    gate.observe_trees([1], [5.0], [16])
    assert gate.draft([1], cost, PLAIN_MS)
    gate.forget(2)
    for _ in range(30):
        gate.observe_trees([3], [5.0], [16])
        gate.forget(3)
    assert all(gate.draft([2], cost, PLAIN_MS) for _ in range(3)), "first trees have paid"


def test_kappa_tracks_what_is_accepted():
    gate = DraftGate()
    for _ in range(400):
        gate.observe_step(6.0, 9.0)
    assert 1.45 < gate.kappa < 1.55


def test_the_cost_is_that_of_the_rows():
    # trees of 16 nodes pay for two requests and not for four: rows beyond 40 are expensive
    cost = np.where(np.arange(200) <= 40, 12.0, 60.0).astype(np.float32)
    gate = DraftGate()
    gate.observe_trees([0, 1, 2, 3], [2.0] * 4, [16] * 4)
    assert gate.draft([0, 1], cost, PLAIN_MS)
    assert not gate.draft([0, 1, 2, 3], cost, PLAIN_MS)


def test_a_request_without_trees_of_its_own_only_makes_the_others_pay_more():
    cost = (10.0 + 0.5 * np.arange(100)).astype(np.float32)

    def gate(tokens):
        gate = DraftGate()
        gate.observe_trees([0], [tokens], [8])
        gate.exclude(1)
        return gate

    # A step with trees takes 1.5 plain steps: 2 tokens more must come from the one tree.
    plain = float(cost[10]) / 1.5
    assert gate(0.7).draft([0], cost, plain)
    assert not gate(0.7).draft([0, 1], cost, plain)
    assert gate(1.4).draft([0, 1], cost, plain)
