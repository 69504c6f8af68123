# SPDX-License-Identifier: Apache-2.0
"""When the controller prefers copies of the context to drafts and to plain steps."""

from dataclasses import replace

import numpy as np
import pytest
from vllm_bastion.policy.controller import Batch, Controller
from vllm_bastion.policy.cost.latency import StepEstimate

from tests.policy.test_controller import Buffers, Costs


def scores_of(*tokens):
    """[R, 31] path scores of copies that bring so many tokens, all but the last one certain."""
    return np.clip(np.array(tokens)[:, None] - np.arange(31), 0.0, 1.0)


def learn(control, slots, promised, accepted=None, *, alone=False):
    """Trees of 8 nodes; they bring what they promise unless `accepted` says otherwise."""
    requests, copies = np.array(slots), np.zeros(len(slots))
    tokens, nodes = np.full(len(slots), promised), np.full(len(slots), 8)
    right = np.full(len(slots), promised if accepted is None else accepted)
    control.observe_trees(requests, tokens, nodes, copies, alone)
    control.observe_outcomes(requests, tokens, right, copies, alone, np.full(len(slots), True))


def with_copies(promised, *, tree_ms=15.0, per_row=0.1, plain_ms=10.0):
    """A controller that knows its trees, and what copies of two requests promise."""
    curve = (tree_ms + per_row * np.arange(129)).astype(np.float32)
    buffers = Buffers()
    control = Controller(
        15, 4, Costs(StepEstimate(curve, plain_ms, plain_ms)), buffers, copy_depth=31
    )
    for _ in range(40):
        learn(control, [0, 1], 2.0)
        control.observe_copies(np.array([0, 1]), np.array(promised), None)
    return control, buffers


def test_drafts_are_weighed_against_copies():
    """Drafts bring 3 tokens for 15 + 1.8 ms, plain steps 1 for 10 ms."""
    batch = Batch([0, 1], [100, 100], 2, 100.0)
    decided = {}
    for promised in ([0.0, 0.0], [0.5, 0.5], [2.0, 2.0], [9.0, 9.0], [9.0, 0.0]):
        control, _ = with_copies(promised)
        decided[tuple(promised)] = control.plan(batch)
    assert [d.drafts for d in decided.values()] == [True, True, False, False, False]
    assert [d.looks_up for d in decided.values()] == [False, False, True, True, True]
    assert decided[9.0, 9.0].reason == "copies pay more"


def test_a_draft_gives_way_to_copies_that_pay_more():
    """Where the host sees the copies: drafts bring 3 tokens for 15.8 ms, plain steps 1 for 10."""
    batch, buffers = Batch([0, 1], [100, 100], 2, 100.0), Buffers()
    curve = (15.0 + 0.1 * np.arange(129)).astype(np.float32)
    costs = Costs(StepEstimate(curve, 10.0, 10.0))
    control = Controller(15, 4, costs, buffers, copy_depth=31, sees_copies=True)
    # Nothing is known of drafts: one is made.
    assert control.plan(batch).drafts
    assert not control.prefers_copies([0, 1], [100, 100], scores_of(9.0, 9.0), True)
    for _ in range(40):
        learn(control, [0, 1], 2.0)
        # What earlier copies promised does not matter.
        control.observe_copies(np.array([0, 1]), np.array([9.0, 9.0]), None)
    decision = control.plan(batch)
    assert decision.drafts and decision.looks_up

    def prefers(*promised, drafts=True, remaining=100):
        return control.prefers_copies([0, 1], [remaining] * 2, scores_of(*promised), drafts)

    found = [prefers(0.0, 0.0), prefers(0.5, 0.5), prefers(9.0, 0.0), prefers(5.0, 5.0)]
    assert found == [False, False, True, True]
    # Otherwise the step would be plain.
    assert prefers(0.5, 0.5, drafts=False) and not prefers(0.0, 0.0, drafts=False)
    assert not prefers(9.0, 9.0, drafts=False, remaining=1)


def test_copies_bring_what_the_budget_would_verify_of_them():
    """Eight copies promise 1.5 tokens each, mostly in tails that cost more than they bring."""
    plain_ms, row_ms, slots = 30.0, 1.1, list(range(16))
    curve = (60.0 + row_ms * np.arange(300)).astype(np.float32)
    costs = Costs(StepEstimate(curve, plain_ms, 1.1 * plain_ms))
    control = Controller(15, 16, costs, copy_depth=31, sees_copies=True)
    control.price(16, 100.0)
    scores = np.zeros((16, 31))
    scores[:8] = 0.6 ** np.arange(1, 32)

    def prefers(rows):
        return control.prefers_copies(slots, [100] * 16, scores * rows, False)

    # Brute force over the number of nodes.
    best = np.sort(scores.ravel())[::-1].cumsum()
    ms = 1.1 * plain_ms + row_ms * np.arange(1, len(best) + 1)
    assert best[-1] > 11 and ((16 + best) / ms).max() < 16 / plain_ms
    assert not prefers(1.0)
    # Copies that are certain, and as many tokens in all.
    scores = scores_of(*[12.0] + [0.0] * 15)
    assert prefers(1.0) and not prefers(0.2)


def test_no_copy_is_preferred_to_a_plain_step_however_cheap_its_step_would_be():
    curve = (15.0 + 0.1 * np.arange(129)).astype(np.float32)
    costs = Costs(StepEstimate(curve, 10.0, 5.0))
    control = Controller(15, 4, costs, copy_depth=31, sees_copies=True)
    control.price(2, 100.0)
    assert not control.prefers_copies([0, 1], [100, 100], scores_of(0.0, 0.0), False)
    assert control.prefers_copies([0, 1], [100, 100], scores_of(1.0, 0.0), False)


def test_copies_are_calibrated_by_what_they_brought():
    """They promise 2 tokens and bring 0.2: drafts are better, and few nodes are worth it."""
    batch, slots = Batch([0, 1], [100, 100], 2, 100.0), np.array([0, 1])
    control, _ = with_copies([2.0, 2.0])
    assert control.plan(batch).looks_up
    for _ in range(12):
        learn(control, [0, 1], 2.0, 0.2, alone=True)
    control.plan(batch)
    dear, _ = with_copies([2.0, 2.0], tree_ms=500.0)
    dear.copy_gains = control.copy_gains
    assert control.plan(batch).drafts and dear.plan(batch).looks_up
    of_drafts, of_copies = np.exp(dear._log_kappa[:, slots])
    assert (of_drafts == 1.0).all() and (of_copies < 0.5).all()
    assert dear.kappa_in_use(slots, True) == pytest.approx(of_copies)
    # The next request in the slot starts with what copies of all requests brought.
    control.restart(0, 100)
    assert control.copy_gains.kappa_of(0) == pytest.approx(control.copy_gains.kappa)


def test_steps_without_a_draft_look_up_and_cost_no_drafter():
    batch = Batch([0, 1], [100, 100], 2, 100.0)
    control, buffers = with_copies([0.0, 0.0], tree_ms=500.0)
    decision = control.plan(batch)
    assert not decision.drafts and decision.looks_up and not control.copies_pay
    # P + C(n) - C(R)
    np.testing.assert_allclose(buffers.copy_cost_ms[2:6], 10.0 + 0.1 * np.arange(4), rtol=1e-5)
    assert control.copy_step_ms(7) == pytest.approx(10.5)
    control.observe_copies(np.array([0, 1]), np.array([3.0, 0.0]), (3, 2.0))
    assert control.copies_pay
    # 2.05 tokens for 10.3 ms are less than 2 for 10.
    control.observe_copies(np.array([0, 1]), np.array([3.0, 0.0]), (3, 0.05))
    assert not control.copies_pay
    ending = control.plan(Batch([0], [1], 1, 100.0))
    waiting = control.plan(replace(batch, backlog=True))
    assert not ending.looks_up and not waiting.looks_up
    off = Controller(15, 4, Costs(StepEstimate(control.costs.curve, 10.0, 10.0)), Buffers())
    assert not off.plan(batch).looks_up


def test_plain_steps_are_tried_where_copies_have_taken_their_place():
    """Nothing but a plain step shows that P, which copies are weighed against, is too high."""
    batch, curve = Batch([0], [1000], 1, 100.0), np.full(129, 40.0, np.float32)
    costs = Costs(StepEstimate(curve, 10.0, 10.0))
    control = Controller(15, 4, costs, copy_depth=31, sees_copies=True)

    def decided(promised, known):
        for _ in range(40):
            learn(control, [0], 1.0)
            control.observe_copies(np.array([0]), np.array([promised]), (1, promised))
        costs.known = known
        return [control.plan(batch) for _ in range(200)]

    trials = [d for d in decided(0.4, known=False) if d.reason == "trial of plain steps"]
    assert len(trials) == 8 and not any(d.drafts or d.looks_up for d in trials)
    for promised, known in ((0.4, True), (5.0, False)):
        assert not any(d.reason == "trial of plain steps" for d in decided(promised, known))


def test_plain_steps_are_tried_where_every_step_drafts():
    """Three tokens for 22.8 ms beside plain steps of 10, which may be faster than calibrated."""
    batch, curve = Batch([0, 1], [1000] * 2, 2, 100.0), 22.0 + 0.1 * np.arange(129)
    costs = Costs(StepEstimate(curve.astype(np.float32), 10.0, 10.0), known=False)
    control = Controller(15, 4, costs, copy_depth=31, sees_copies=True)
    for _ in range(40):
        learn(control, [0, 1], 2.0)
        control.observe_copies(np.array([0, 1]), np.zeros(2), None)
    reasons = [control.plan(batch).reason for _ in range(60)]
    assert reasons.count("trial of plain steps") == 4 and reasons.count("pays") == 56


def test_looks_that_save_less_than_they_take_become_rare():
    """A look takes 0.5 ms; copies of three tokens for 10.3 ms save 9.7."""
    batch, curve = Batch([0], [1000], 1, 100.0), (500.0 + 0.1 * np.arange(129)).astype(np.float32)
    costs = Costs(StepEstimate(curve, 10.0, 10.0, look_ms=0.5))
    control = Controller(15, 4, costs, copy_depth=31, sees_copies=True)
    learn(control, [0], 1.0)

    def looks(steps, nodes):
        count = 0
        for _ in range(steps):
            decision = control.plan(batch)
            assert not decision.drafts
            count += decision.looks_up
            if decision.looks_up:
                found = (nodes, float(nodes))
                control.observe_copies(np.array([0]), np.array([float(nodes)]), found)
        return count

    assert looks(60, 0) >= 50, "at first it looks"
    looks(200, 0)
    assert looks(128, 0) == 4
    # One look that saves 9.7 ms is nearly enough, and four are enough.
    looks(40, 2)
    assert looks(20, 2) == 20
