# SPDX-License-Identifier: Apache-2.0
"""When the controller drafts: by each request's own trees, with probes that back off."""

import itertools
import math

import numpy as np
import pytest
from vllm_bastion.policy.controller import Batch, Controller
from vllm_bastion.policy.cost.latency import StepEstimate
from vllm_bastion.policy.gains import tokens_until
from vllm_bastion.policy.remaining import NO_LIMIT
from vllm_bastion.step_times import StepTimes

PLAIN_MS, SLOTS = 10.0, 2000


def estimate(tree_ms, plain_ms=PLAIN_MS):
    return StepEstimate(np.full(3000, tree_ms, dtype=np.float32), plain_ms, plain_ms)


class Costs:
    """A latency model that is told what steps cost."""

    def __init__(self, costs, known=True):
        self.costs, self.known = costs, known
        self.observed = []

    def estimate(self, num_reqs, context_len, spared=0):
        return self.costs

    def plain_age(self, num_reqs):
        return 0.0 if self.known else math.inf

    def observe(self, step, passed=1):
        self.observed.append((step, passed))

    def correction(self, num_reqs):
        return {}


def controller(costs, **given):
    return Controller(15, SLOTS, Costs(costs, **given))


def drafts(control, requests, costs=None, remaining=None, **given):
    if costs is not None:
        control.latency.costs = costs
        control._is_current = False
    left = [NO_LIMIT] * len(requests) if remaining is None else remaining
    return control.plan(Batch(requests, left, len(requests), 1.0, **given)).drafts


class Engine:
    """Drives a controller as the engine does: a tree is verified if and only if it was asked for.

    accepted: accepted over promised draft tokens.
    """

    def __init__(self, tree_ms, accepted=1.0, seed=0):
        self.control = controller(estimate(tree_ms))
        self.tree_ms, self.accepted = tree_ms, accepted
        self.rng = np.random.default_rng(seed)
        self.drafted = {}
        self.ms = self.tokens = 0.0
        self.reasons = []

    def arrive(self, requests):
        """New requests; the last step of their prompts decides whether they start with a tree."""
        for name in requests:
            self.control.restart(name, 0)
        self.drafted = set(requests) if drafts(self.control, requests) else set()

    def run(self, worth, steps, noise=0.2):
        """Run steps. Returns for each whether it had trees.

        worth: request -> draft tokens that a tree of 16 nodes promises.
        """
        names, seen = list(worth), []
        for _ in range(steps):
            trees = [name for name in names if name in self.drafted]
            seen.append(bool(trees))
            self.ms += self.tree_ms if trees else PLAIN_MS
            self.tokens += len(names)
            if trees:
                gains = [
                    max(0.0, worth[n] * (1 + noise * self.rng.standard_normal())) for n in trees
                ]
                self.control.gains.add_trees(trees, gains, [16] * len(trees))
                kept = [self.accepted * g for g in gains]
                self.control.gains.add_outcomes(trees, gains, kept)
                self.tokens += self.accepted * sum(gains)
            decision = self.control.plan(Batch(names, [NO_LIMIT] * len(names), len(names), 1.0))
            self.reasons.append(decision.reason)
            self.drafted = set(names) if decision.drafts else set()
        return seen


def test_trees_that_pay_never_stop():
    engine = Engine(tree_ms=15.0)
    engine.arrive([0])
    assert all(engine.run({0: 3.0}, 500))
    assert engine.reasons[-1] == "pays"


def test_trees_that_do_not_pay_stop_at_once_and_lose_little():
    engine = Engine(tree_ms=30.0)
    engine.arrive([0])
    seen = engine.run({0: 0.5}, 3000)
    assert seen[0] and not any(seen[5:9])
    assert engine.reasons[-1] == "does not pay"
    # The share of the time, and what it starts with.
    assert engine.ms / engine.tokens < (1 + 1 / 128) * PLAIN_MS + 8 * PLAIN_MS / 3000


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
    # A probe of two steps that lose a quarter each is paid for in 150 steps.
    assert min(tried[4:]) >= 39


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
    """A request whose trees keep less than they promise must not end drafting for others."""
    control = controller(estimate(20.0))
    for _ in range(40):
        control.gains.add_trees([1], [3.0], [16])
        control.gains.add_outcomes([1], [3.0], [3.0])
    for _ in range(400):
        control.gains.add_trees([0], [3.0], [16])
        control.gains.add_outcomes([0], [3.0], [0.0])
    assert drafts(control, [1])
    assert not drafts(control, [0])
    control.restart(2, 0)
    assert drafts(control, [2]), "sixteen bad trees of one request against sixteen good ones"


def test_a_reused_request_slot_starts_anew():
    engine = Engine(tree_ms=20.0)
    engine.arrive([0])
    engine.run({0: 0.5}, 40)
    engine.arrive([0])
    gains = engine.control.gains
    assert gains.is_new(0) and gains.expected([0], [99]) == gains.expected([7], [99])


def test_one_newcomer_does_not_make_a_full_batch_draft():
    engine = Engine(tree_ms=30.0)
    names = list(range(32))
    engine.arrive(names)
    engine.run(dict.fromkeys(names, 0.5), 20)
    engine.control.restart(100, 0)
    names[7] = 100
    assert not drafts(engine.control, names)


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
    control = controller(estimate(30.0))
    assert drafts(control, [0])
    control.gains.add_trees([0], [0.0], [0])
    assert not drafts(control, [0])


def test_a_drafter_that_overstates_itself_is_corrected():
    # promises four tokens in two plain steps' time, and gives none
    engine = Engine(tree_ms=20.0, accepted=0.0)
    engine.arrive([0])
    seen = engine.run({0: 4.0}, 300)
    assert engine.control.gains.kappa < 0.5
    assert sum(seen[20:]) < 30


def test_kappa_tracks_what_is_accepted():
    control = controller(estimate(20.0))
    for request in range(400):
        control.gains.add_trees([request], [6.0], [8])
        control.gains.add_outcomes([request], [6.0], [9.0])
    assert 1.4 < control.gains.kappa < 1.5


def test_short_replies_do_not_make_drafts_look_worse():
    """A reply's last tree is more likely a long one. Drafts promise 3 tokens and bring 3."""
    rng, control = np.random.default_rng(0), controller(estimate(15.0))
    kappas = []
    for _ in range(2000):
        control.restart(0, 20)
        left = 20
        while left > 0:
            accepted = rng.geometric(0.25) - 1
            left -= 1 + accepted
            tree = np.array([0]), np.array([3.0])
            control.observe_trees(*tree, np.array([8]), np.zeros(1), False)
            goes_on = np.array([left > 0])
            control.observe_outcomes(*tree, np.array([accepted]), np.zeros(1), False, goes_on)
        kappas.append(control.gains.kappa)
    assert np.mean(kappas[100:]) == pytest.approx(1.0, abs=0.02)


def test_the_cost_is_that_of_the_rows():
    # trees of 16 nodes pay for two requests and not for four: rows beyond 40 are expensive
    cost = np.where(np.arange(200) <= 40, 12.0, 90.0).astype(np.float32)
    control = controller(StepEstimate(cost, PLAIN_MS, PLAIN_MS))
    for _ in range(16):
        control.gains.add_trees([0, 1, 2, 3], [2.0] * 4, [16] * 4)
    assert drafts(control, [0, 1])
    assert not drafts(control, [0, 1, 2, 3])


@pytest.mark.parametrize("tokens", [0.0, 0.3, 2.0, 7.5])
@pytest.mark.parametrize("end", [0, 1, 3, 20])
def test_tokens_until_the_end_are_those_of_a_geometric_length(end, tokens):
    counts = np.arange(4000)
    chances = (tokens / (1 + tokens)) ** counts / (1 + tokens)
    expected = float((np.minimum(counts, end) * chances).sum())
    assert tokens_until(end, tokens) == pytest.approx(expected, rel=1e-9, abs=1e-12)


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


def told(tokens, costs, **given):
    """A controller to which two requests have shown sixteen trees each."""
    control = controller(costs, **given)
    for _ in range(16):
        control.gains.add_trees([0, 1], [tokens] * 2, [8] * 2)
        control.gains.add_outcomes([0, 1], [tokens] * 2, [tokens] * 2)
    return control


@pytest.mark.parametrize(("ratio", "tries"), [(15, True), (39, True), (41, False)])
def test_the_first_tree_is_not_tried_if_its_depth_cannot_pay_for_it(ratio, tries):
    """Calibrated costs may be wrong by 2.5."""
    control = controller(estimate(ratio * PLAIN_MS))
    assert drafts(control, [0]) == tries
    # Plain steps do not change that.
    assert tries or not any(drafts(control, [0]) for _ in range(1000))


def test_the_first_trees_are_not_tried_for_a_last_token():
    assert drafts(controller(estimate(30.0)), [0], remaining=[4])
    decision = controller(estimate(30.0)).plan(Batch([0], [1], 1, 1.0))
    assert not decision.drafts and decision.replies_end


def test_a_request_that_never_has_trees_only_makes_the_others_pay_more():
    cost = (10.0 + 0.5 * np.arange(100)).astype(np.float32)

    def control(tokens):
        # A step with trees takes 1.5 plain steps: 2 tokens more must come from the one tree.
        plain_ms = float(cost[10]) / 1.5
        told_control = told(tokens, StepEstimate(cost, plain_ms, plain_ms))
        told_control.gains.exclude(2)
        return told_control

    assert drafts(control(0.7), [0])
    assert not drafts(control(0.5), [0, 2])
    assert drafts(control(1.4), [0, 2])


def test_a_reply_that_ends_soon_cannot_use_a_whole_tree():
    assert drafts(told(5.0, estimate(30.0)), [0])
    assert drafts(told(5.0, estimate(30.0)), [0], remaining=[20])
    # Two more tokens would take two plain steps.
    assert not drafts(told(5.0, estimate(30.0)), [0], remaining=[2])
    # The other request gains for both, or does not.
    assert drafts(told(5.0, estimate(30.0)), [0, 1], remaining=[1, 50])
    assert not drafts(told(5.0, estimate(36.0)), [0, 1], remaining=[1, 50])
    assert drafts(told(5.0, estimate(36.0)), [0, 1], remaining=[50, 50])


def test_nothing_is_tried_at_the_end_of_a_reply():
    def tries(remaining):
        control = told(1.2, estimate(25.0))
        control.restart(2, 0)  # nothing is known of it but others' trees
        return any(drafts(control, [2], remaining=[left]) for left in remaining)

    assert tries(range(200, 1, -1))
    assert not tries([2] * 200)


def test_plain_steps_are_tried_four_in_a_row_and_only_if_they_could_be_faster():
    control = told(0.6, estimate(15.0), known=False)
    kinds = [drafts(control, [0]) for _ in range(40)]
    runs = [len(list(run)) for kind, run in itertools.groupby(kinds) if not kind]
    assert runs and set(runs) == {4}
    control.latency.known = True  # there is nothing to learn
    assert all(drafts(control, [0]) for _ in range(200))
    assert all(drafts(told(5.0, estimate(15.0), known=False), [0]) for _ in range(200))


def test_without_a_timer_probes_of_trees_back_off_all_the_same():
    """Sixteen requests, 13 steps a reply, a true gain of 1.43; nobody corrects the costs."""
    engine, probes = Engine(tree_ms=20.0), 0
    for reply in range(40):
        names = [16 * reply + i for i in range(16)]
        engine.arrive(names)
        engine.run(dict.fromkeys(names, 1.86), 13)
    assert not any(reason.startswith("trial") for reason in engine.reasons)
    assert engine.reasons.count("pays") > 500
    # Where trees do not pay, probes are rare for any length of replies.
    engine = Engine(tree_ms=20.0)
    for reply in range(200):
        names = [8 * reply + i for i in range(8)]
        engine.arrive(names)
        engine.run(dict.fromkeys(names, 0.6), 14)
    probes = sum(reason == "trial of trees" for reason in engine.reasons)
    assert 0 < probes / len(engine.reasons) < 0.03
    lost = probes * 20.0 * (1 - 1.6 / 2)
    assert lost / engine.ms < 1 / 128


class Buffers:
    def __init__(self):
        self.curves, self.kappas = [], []
        self.copy_cost_ms = None

    def set_copy_cost_ms(self, cost_ms):
        self.copy_cost_ms = cost_ms

    def set_cost_ms(self, cost_ms):
        self.curves.append(cost_ms)

    def set_log_kappa(self, log_kappa):
        self.kappas.append(log_kappa.copy())


def test_the_scores_of_trees_are_calibrated_by_their_requests():
    """A promises more than it keeps, B what it keeps."""
    buffers = Buffers()
    control = Controller(15, 4, Costs(estimate(15.0)), buffers)
    for _ in range(60):
        control.gains.add_trees([1, 3], [8.0, 4.0], [16, 16])
        control.gains.add_outcomes([1, 3], [8.0, 4.0], [2.4, 4.0])
        drafts(control, [1, 3])
    kappa, of_copies = np.exp(buffers.kappas[-1])
    assert (of_copies == 1.0).all()
    assert 0.25 < kappa[1] < 0.4 and 0.8 < kappa[3] < 1.1
    assert control.kappa_in_use(np.array([3, 1]), False) == pytest.approx(kappa[[3, 1]])
    assert len(buffers.kappas) < 40 and len(buffers.curves) == 1
    # Shared between two requests, C(n) = 10 + 0.5 n: the calibrated scores emit more per ms.
    promised = np.stack([kappa[1] / 0.3 * 0.95 ** np.arange(1, 40), 0.8 ** np.arange(1, 40)])
    really = np.stack([0.3 * 0.95 ** np.arange(1, 40), 0.8 ** np.arange(1, 40)])

    def speed(scores):
        order = np.argsort(-scores.ravel(), kind="stable")
        n = np.argmax((2 + np.cumsum(scores.ravel()[order])) / (11 + 0.5 * np.arange(1, 79))) + 1
        return (2 + really.ravel()[order[:n]].sum()) / (11 + 0.5 * n)

    assert speed(promised * [[kappa[1]], [kappa[3]]]) > 1.04 * speed(promised)


def test_consecutive_plain_steps_are_learned_from_together():
    control = controller(estimate(20.0))

    def plain(num_reqs=1):
        return StepTimes(num_reqs, num_reqs, 0.0, False, False, 5.0, 5.0)

    tree = StepTimes(9, 1, 0.0, True, True, 5.0, 5.0)
    told_of = []
    control.on_step = lambda *step: told_of.append(step)
    control.observe([plain(), plain(), plain(2), tree, plain()])
    observed = [(s.num_reqs, s.verified, passed) for s, passed in control.latency.observed]
    assert observed == [(1, False, 2), (2, False, 1), (1, True, 1), (1, False, 1)]
    assert [rows for _, rows, *_ in told_of] == [1, 2, 9, 1]


def test_a_step_without_use_for_drafts_says_why():
    def reason(**given):
        return controller(estimate(15.0)).plan(Batch([0], [9], 1, 1.0, **given)).reason

    assert reason(backlog=True) == "prompts wait"
    assert reason(wants_nodes=False) == "requests want none"
    assert reason() == "pays"
    # A data-parallel rank may take a step in which all replies end.
    assert controller(estimate(500.0)).plan(Batch([], [], 1, 1.0)).replies_end
