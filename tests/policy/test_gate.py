# SPDX-License-Identifier: Apache-2.0
"""When the gate drafts: per request, with bounded trials of either kind."""

import itertools

import numpy as np
import pytest

from vllm_bastion.policy.cost.online import StepEstimate
from vllm_bastion.policy.gate import DraftGate, tokens_until

PLAIN_MS = 10.0


def estimate(tree_ms, plain_ms=PLAIN_MS, sd=0.0):
    return StepEstimate(np.full(2000, tree_ms, dtype=np.float32), plain_ms, sd)


class Engine:
    """Drives a gate as the engine does: a tree is verified if and only if the gate asked for it.

    accepted: accepted over promised draft tokens.
    """

    def __init__(self, tree_ms, accepted=1.0, seed=0):
        self.gate = DraftGate(15)
        self.costs = estimate(tree_ms)
        self.accepted = accepted
        self.rng = np.random.default_rng(seed)
        self.drafted = {}
        self.ms = self.tokens = 0.0

    def arrive(self, requests):
        """New requests; the last step of their prompts decides whether they start with a tree."""
        for name in requests:
            self.gate.forget(name)
        self.drafted = set(requests) if self.gate.draft(requests, self.costs) else set()

    def run(self, worth, steps, noise=0.2):
        """Run steps. Returns for each whether it had trees.

        worth: request -> draft tokens that a tree of 16 nodes promises.
        """
        names, seen = list(worth), []
        for _ in range(steps):
            trees = [name for name in names if name in self.drafted]
            seen.append(bool(trees))
            self.ms += float(self.costs.tree_ms[0]) if trees else PLAIN_MS
            self.tokens += len(names)
            if trees:
                gains = [
                    max(0.0, worth[n] * (1 + noise * self.rng.standard_normal())) for n in trees
                ]
                self.gate.observe_trees(trees, gains, [16] * len(trees))
                self.gate.observe_outcomes(trees, gains, [self.accepted * g for g in gains])
                self.tokens += self.accepted * sum(gains)
            again = self.gate.draft(names, self.costs)
            self.drafted = set(names) if again else set()
        return seen


def test_trees_that_pay_never_stop():
    engine = Engine(tree_ms=15.0)
    engine.arrive([0])
    assert all(engine.run({0: 3.0}, 500))
    assert engine.gate.reason == "pays"


def test_trees_that_do_not_pay_stop_at_once_and_lose_little():
    engine = Engine(tree_ms=30.0)
    engine.arrive([0])
    seen = engine.run({0: 0.5}, 3000)
    assert seen[0] and not any(seen[5:9])
    assert engine.gate.reason == "does not pay"
    # The share of the time, and what it starts with.
    assert engine.ms / engine.tokens < (1 + 1 / 64) * PLAIN_MS + 8 * PLAIN_MS / 3000


@pytest.mark.parametrize(("ratio", "sd", "tries"), [(15, 0, 1), (17, 0, 0), (17, 0.1, 1)])
def test_the_first_tree_is_not_tried_if_its_depth_cannot_pay_for_it(ratio, sd, tries):
    gate = DraftGate(depth=15)
    assert gate.draft([0], estimate(ratio * PLAIN_MS, sd=sd)) == bool(tries)
    # Plain steps do not change that.
    assert tries or not any(gate.draft([0], estimate(ratio * PLAIN_MS)) for _ in range(1000))


@pytest.mark.parametrize("count", [16, 256])
def test_what_cannot_pay_is_not_tried(count):
    engine = Engine(tree_ms=80.0)
    names = list(range(count))
    engine.arrive(names)
    seen = engine.run(dict.fromkeys(names, 0.3), 400)
    assert not any(seen[5:])


def test_trees_come_back_when_they_pay_again():
    engine = Engine(tree_ms=20.0)
    engine.arrive([0])
    assert not engine.run({0: 0.2}, 400)[-1]
    seen = engine.run({0: 5.0}, 600)
    first = seen.index(True)
    assert first <= 200 and all(seen[first + 4 :])


def test_new_requests_get_a_tree_after_hopeless_ones():
    engine = Engine(tree_ms=20.0)
    for name in range(20):
        engine.arrive([name])
        engine.run({name: 0.5}, 40)
    tried = []
    for name in range(100, 110):
        engine.arrive([name])
        tried.append(sum(engine.run({name: 5.0}, 40)))
    assert np.mean(tried) > 36


def test_hopeless_requests_cost_little_however_many_arrive():
    engine = Engine(tree_ms=30.0)
    for first in range(0, 1200, 4):
        names = list(range(first, first + 4))
        engine.arrive(names)
        engine.run(dict.fromkeys(names, 0.2), 30)
    assert engine.ms / engine.tokens < 1.02 * PLAIN_MS / 4


def test_a_good_request_is_judged_by_itself():
    engine = Engine(tree_ms=25.0)
    shares = {}
    for name in range(40):
        good = name % 2 == 0
        engine.arrive([name])
        seen = engine.run({name: 4.0 if good else 0.7}, 60)
        shares.setdefault(good, []).append(sum(seen) / 60)
    assert np.mean(shares[True]) > 0.9
    assert np.mean(shares[False]) < 0.2


def test_one_requests_penalties_do_not_teach_the_others():
    """A request whose trees keep less than they promise must not close the gate for others."""
    gate, costs = DraftGate(15), estimate(20.0)
    for _ in range(40):
        gate.observe_trees([1], [3.0], [16])
        gate.observe_outcomes([1], [3.0], [3.0])
    for _ in range(400):
        gate.observe_trees([0], [3.0], [16])
        gate.observe_outcomes([0], [3.0], [0.0])
    assert gate.draft([1], costs)
    assert not gate.draft([0], costs)
    gate.forget(2)
    assert gate.draft([2], costs), "sixteen bad trees of one request against sixteen good ones"


def test_a_reused_request_slot_starts_anew():
    engine = Engine(tree_ms=20.0)
    engine.arrive([0])
    engine.run({0: 0.5}, 40)
    engine.arrive([0])
    assert engine.run({0: 5.0}, 1) == [True]


def test_one_newcomer_does_not_make_a_full_batch_draft():
    engine = Engine(tree_ms=30.0)
    names = list(range(32))
    engine.arrive(names)
    engine.run(dict.fromkeys(names, 0.5), 20)
    engine.gate.forget(100)
    names[7] = 100
    assert not engine.gate.draft(names, engine.costs)


def test_a_batch_drafts_by_its_sum():
    engine = Engine(tree_ms=20.0)
    engine.arrive([0, 1, 2, 3])
    # break-even is one accepted token each: one request carries the other three
    assert all(engine.run({0: 8.0, 1: 0.1, 2: 0.1, 3: 0.1}, 100))
    engine = Engine(tree_ms=20.0)
    engine.arrive([0, 1, 2, 3])
    assert sum(engine.run({0: 2.0, 1: 0.1, 2: 0.1, 3: 0.1}, 100)) < 25


def test_little_is_lost_at_the_break_even():
    engine = Engine(tree_ms=20.5, seed=3)
    engine.arrive([0])
    seen = engine.run({0: 1.0}, 5000)
    assert sum(a != b for a, b in itertools.pairwise(seen)) <= 1000
    assert engine.ms / engine.tokens < 1.02 * PLAIN_MS


def test_a_tree_without_a_node_worth_verifying_counts():
    gate, costs = DraftGate(15), estimate(30.0)
    assert gate.draft([0], costs)
    gate.observe_trees([0], [0.0], [0])
    assert not gate.draft([0], costs)


def test_a_drafter_that_overstates_itself_is_corrected():
    # promises four tokens in two plain steps' time, and gives none
    engine = Engine(tree_ms=20.0, accepted=0.0)
    engine.arrive([0])
    seen = engine.run({0: 4.0}, 300)
    assert engine.gate.kappa < 0.5
    assert sum(seen[20:]) < 30


def test_kappa_tracks_what_is_accepted():
    gate = DraftGate(15)
    for request in range(400):
        gate.observe_trees([request], [6.0], [8])
        gate.observe_outcomes([request], [6.0], [9.0])
    assert 1.4 < gate.kappa < 1.5


def test_the_cost_is_that_of_the_rows():
    # trees of 16 nodes pay for two requests and not for four: rows beyond 40 are expensive
    cost = np.where(np.arange(200) <= 40, 12.0, 90.0).astype(np.float32)
    gate = DraftGate(15)
    for _ in range(16):
        gate.observe_trees([0, 1, 2, 3], [2.0] * 4, [16] * 4)
    assert gate.draft([0, 1], StepEstimate(cost, PLAIN_MS))
    assert not gate.draft([0, 1, 2, 3], StepEstimate(cost, PLAIN_MS))


def test_a_request_that_never_has_trees_only_makes_the_others_pay_more():
    cost = (10.0 + 0.5 * np.arange(100)).astype(np.float32)

    def gate(tokens):
        gate = DraftGate(15)
        for _ in range(16):
            gate.observe_trees([0], [tokens], [8])
        gate.exclude(1)
        gate.draft([5], estimate(10.0, 0.0001))  # spends what the allowance starts with
        return gate

    # A step with trees takes 1.5 plain steps: 2 tokens more must come from the one tree.
    plain = float(cost[10]) / 1.5
    assert gate(0.7).draft([0], StepEstimate(cost, plain))
    assert not gate(0.5).draft([0, 1], StepEstimate(cost, plain))
    assert gate(1.4).draft([0, 1], StepEstimate(cost, plain))


def test_plain_steps_are_tried_while_their_cost_is_in_doubt_and_four_in_a_row():
    gate, names = DraftGate(15), [0]
    for _ in range(64):
        gate.observe_trees(names, [0.6], [16])
        gate.observe_outcomes(names, [0.6], [0.6])
    drafts = [gate.draft(names, estimate(15.0, sd=0.3)) for _ in range(40)]
    runs = [len(list(run)) for kind, run in itertools.groupby(drafts) if not kind]
    assert runs and set(runs) == {4}
    # Once it is known, there is nothing to try.
    assert all(gate.draft(names, estimate(15.0, sd=0.01)) for _ in range(200))
    # Nor where trees gain more than the doubt.
    for _ in range(64):
        gate.observe_trees(names, [5.0], [16])
        gate.observe_outcomes(names, [5.0], [5.0])
    assert all(gate.draft(names, estimate(15.0, sd=0.3)) for _ in range(200))


def test_trials_of_plain_steps_are_paid_from_the_allowance():
    gate, plain = DraftGate(15), 0
    for _ in range(64):
        gate.observe_trees([0], [1.0], [16])
        gate.observe_outcomes([0], [1.0], [1.0])
    for _ in range(4000):  # trees gain a third over plain steps, and the doubt never ends
        plain += not gate.draft([0], estimate(15.0, sd=1.0))
    lost = plain * PLAIN_MS * (1 - 15.0 / 20.0)
    assert 0.5 / 64 < lost / (4000 * 15.0) < 1.5 / 64


@pytest.mark.parametrize("tokens", [0.0, 0.3, 2.0, 7.5])
@pytest.mark.parametrize("end", [0, 1, 3, 20])
def test_tokens_until_the_end_are_those_of_a_geometric_length(end, tokens):
    counts = np.arange(4000)
    chances = (tokens / (1 + tokens)) ** counts / (1 + tokens)
    expected = float((np.minimum(counts, end) * chances).sum())
    assert tokens_until(end, tokens) == pytest.approx(expected, rel=1e-9, abs=1e-12)


def told(tokens):
    """A gate to which two requests have shown sixteen trees each."""
    gate = DraftGate(15)
    for _ in range(16):
        gate.observe_trees([0, 1], [tokens] * 2, [8] * 2)
        gate.observe_outcomes([0, 1], [tokens] * 2, [tokens] * 2)
    return gate


def test_a_reply_that_ends_soon_cannot_use_a_whole_tree():
    assert told(5.0).draft([0], estimate(30.0))
    assert told(5.0).draft([0], estimate(30.0), [20])
    # Two more tokens would take two plain steps.
    assert not told(5.0).draft([0], estimate(30.0), [2])
    # The other request gains for both, or does not.
    assert told(5.0).draft([0, 1], estimate(30.0), [1, 50])
    assert not told(5.0).draft([0, 1], estimate(36.0), [1, 50])
    assert told(5.0).draft([0, 1], estimate(36.0), [50, 50])


def test_nothing_is_tried_at_the_end_of_a_reply():
    def tries(remaining):
        gate, costs = told(1.2), estimate(25.0, sd=0.2)
        gate.forget(2)  # nothing is known of it but others' trees
        return any(gate.draft([2], costs, [left]) for left in remaining)

    assert tries(range(200, 1, -1))
    assert not tries([2] * 200)


def test_the_first_trees_are_not_tried_for_a_last_token():
    assert DraftGate(15).draft([0], estimate(30.0), [4])
    assert not DraftGate(15).draft([0], estimate(30.0), [2])


def test_bad_first_requests_do_not_end_drafting_for_good():
    """Four at a time, replies of 60 steps. A step with trees takes four plain steps."""
    engine = Engine(tree_ms=40.0)

    def decode(first, worth, rounds):
        shares = []
        for start in range(first, first + 4 * rounds, 4):
            names = list(range(start, start + 4))
            engine.arrive(names)
            shares.append(np.mean(engine.run(dict.fromkeys(names, worth), 60)))
        return shares

    decode(0, 2.2, 4)
    assert np.mean(decode(100, 5.0, 40)[10:]) > 0.9
    # Nor do good ones leave much to be lost.
    engine.ms = engine.tokens = 0.0
    decode(1000, 2.2, 40)
    assert engine.ms / engine.tokens < 1.03 * PLAIN_MS / 4
