# SPDX-License-Identifier: Apache-2.0
"""The gate against a machine whose costs the test knows: which arm it takes, and what it loses."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable

import pytest

from vllm_bastion.scheduler.gate import Arm, Gate

ALL = (Arm.PLAIN, Arm.NGRAM, Arm.TREE)
BOTH = (Arm.PLAIN, Arm.TREE)

# Arm and requests -> milliseconds of a step; arm -> tokens per request.
Costs = Callable[[Arm, int], float]
Tokens = dict[Arm, float]


class Machine:
    """Steps of a gate: each ends with an arm whose drafts the next one verifies.

    Args:
        lag: steps that are scheduled before a step's output arrives (asynchronous scheduling).
        noise: relative standard deviation of times; tokens are drawn, too.
    """

    def __init__(
        self, gate: Gate, ms: Costs, tokens: Tokens, *, lag: int = 0, noise: float = 0.1
    ) -> None:
        self.gate, self.ms, self.tokens, self.lag, self.noise = gate, ms, tokens, lag, noise
        self.random = random.Random(0)
        self._arms = [gate.arms[-1]]
        self._outputs: list[tuple[Arm, int, int, float]] = []
        self.time = self.emitted = 0.0

    def run(
        self, steps: int, reqs: int = 1, slow: Callable[[int], float] = lambda i: 1.0
    ) -> Counter:
        """Decode; returns how often each arm was chosen. slow: factor on a step's time."""
        chosen: Counter[Arm] = Counter()
        for i in range(steps):
            verified = self._arms[-1]
            arm = self.gate.choose(reqs)
            self._arms.append(arm)
            chosen[arm] += 1
            ms = self.ms(verified, reqs) * max(0.2, self.random.gauss(1.0, self.noise))
            drawn = self._drawn(verified, reqs)
            self.time += ms
            self.emitted += drawn / reqs
            clean = verified == arm
            self._outputs.append((verified, reqs, drawn, slow(i) * ms if clean else 0.0))
            if len(self._outputs) > self.lag:
                self.gate.observe(*self._outputs.pop(0))
        return chosen

    def _drawn(self, arm: Arm, reqs: int) -> int:
        """Tokens of a step: geometric with the arm's mean."""
        more = 1.0 - 1.0 / self.tokens[arm]
        return reqs + sum(
            sum(1 for _ in iter(lambda: self.random.random() < more, False)) for _ in range(reqs)
        )

    @property
    def rate(self) -> float:
        """Tokens per request and millisecond so far."""
        return self.emitted / self.time


def flat(**ms: float) -> Costs:
    return lambda arm, reqs: ms[arm.name.lower()]


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize(
    ("tree_ms", "tree_tokens", "best"),
    [(2.0, 3.0, Arm.TREE), (2.0, 1.5, Arm.PLAIN), (1.1, 2.0, Arm.TREE), (5.0, 2.0, Arm.PLAIN)],
)
def test_takes_the_faster_arm(lag: int, tree_ms: float, tree_tokens: float, best: Arm) -> None:
    tokens = {Arm.PLAIN: 1.0, Arm.TREE: tree_tokens}
    machine = Machine(Gate(BOTH), flat(plain=1.0, tree=tree_ms), tokens, lag=lag)
    machine.run(200)
    machine.time = machine.emitted = 0.0
    chosen = machine.run(2000)
    assert chosen[best] > 0.8 * 2000
    assert machine.rate > 0.96 * max(1.0, tree_tokens / tree_ms)


def test_an_equal_rate_takes_the_simpler_arm() -> None:
    tokens = {Arm.PLAIN: 1.0, Arm.TREE: 1.0}
    machine = Machine(Gate(BOTH), flat(plain=1.0, tree=1.0), tokens, noise=0.0)
    machine.run(50)
    assert machine.run(500)[Arm.PLAIN] > 400


@pytest.mark.parametrize("lag", [0, 1])
def test_three_arms(lag: int) -> None:
    for tokens, best in (
        ({Arm.NGRAM: 3.0, Arm.TREE: 3.2}, Arm.NGRAM),
        ({Arm.NGRAM: 1.2, Arm.TREE: 4.0}, Arm.TREE),
        ({Arm.NGRAM: 1.0, Arm.TREE: 1.2}, Arm.PLAIN),
    ):
        costs = flat(plain=1.0, ngram=1.2, tree=2.0)
        machine = Machine(Gate(ALL), costs, {Arm.PLAIN: 1.0, **tokens}, lag=lag)
        machine.run(300)
        assert machine.run(2000)[best] > 0.8 * 2000, best


def test_unlucky_first_drafts_do_not_decide() -> None:
    """Tokens of one request's step vary as much as their mean."""
    tokens = {Arm.PLAIN: 1.0, Arm.NGRAM: 2.0, Arm.TREE: 6.0}
    for seed in range(100):
        machine = Machine(Gate(ALL), flat(plain=1.0, ngram=1.1, tree=2.0), tokens)
        machine.random.seed(seed)
        assert machine.run(400)[Arm.TREE] > 200, seed


def test_exploration_loses_less_than_a_hundredth() -> None:
    """Over plain decoding alone, where trees are hopeless and after they were measured."""
    for tree_ms in (1.5, 3.0, 10.0):
        costs, tokens = flat(plain=1.0, tree=tree_ms), {Arm.PLAIN: 1.0, Arm.TREE: 1.05}
        machine = Machine(Gate(BOTH), costs, tokens)
        machine.run(100)
        machine.time = machine.emitted = 0.0
        machine.run(5000)
        assert machine.rate > 0.99


@pytest.mark.parametrize("factor", [3.0, 30.0])
@pytest.mark.parametrize("lag", [0, 1])
def test_a_burst_of_slow_steps_is_forgotten(lag: int, factor: float) -> None:
    """Wherever three slow steps fall, the right arm is back within 300 steps."""
    for right, tokens in ((Arm.PLAIN, 1.4), (Arm.TREE, 4.0)):
        for begin in range(0, 60, 3):
            costs, of = flat(plain=1.0, tree=2.0), {Arm.PLAIN: 1.0, Arm.TREE: tokens}
            machine = Machine(Gate(BOTH), costs, of, lag=lag)
            machine.run(60, slow=lambda i, begin=begin: factor if begin <= i < begin + 3 else 1.0)
            machine.run(300)
            chosen = machine.run(200)
            assert chosen[right] > 150, (right, begin, chosen)


def test_a_stalled_process_and_a_clock_that_jumps() -> None:
    """One time of 5 s, of nothing, a negative one or not a number changes no decision."""
    gate = Gate(BOTH)
    machine = Machine(gate, flat(plain=1.0, tree=2.0), {Arm.PLAIN: 1.0, Arm.TREE: 3.0})
    machine.run(200)
    for ms in (5000.0, 0.0, -3.0, math.nan, math.inf):
        gate.observe(Arm.TREE, 1, 3, ms)
        assert gate.costs(1)[Arm.TREE] < 2.5
        assert machine.run(64)[Arm.TREE] > 55


def test_batches_have_times_of_their_own() -> None:
    """One request alone, 16 at once, back to one: trees pay for one request only."""
    gate = Gate(BOTH)

    def costs(arm: Arm, reqs: int) -> float:
        return (1.0 + 0.05 * reqs) * (1.5 + 0.2 * reqs if arm else 1.0)

    machine = Machine(gate, costs, {Arm.PLAIN: 1.0, Arm.TREE: 2.5})
    machine.run(200, reqs=1)
    assert machine.run(200, reqs=1)[Arm.TREE] > 140
    machine.run(50, reqs=16)
    assert machine.run(200, reqs=16)[Arm.PLAIN] > 150
    assert machine.run(200, reqs=1)[Arm.TREE] > 140


def test_costs_that_change_are_found() -> None:
    for before, after, best in ((3.0, 1.2, Arm.TREE), (1.2, 3.0, Arm.PLAIN)):
        now = {Arm.PLAIN: 1.0, Arm.TREE: before}
        tokens = {Arm.PLAIN: 1.0, Arm.TREE: 2.0}
        machine = Machine(Gate(BOTH), lambda arm, _, now=now: now[arm], tokens)
        machine.run(400)
        now[Arm.TREE] = after
        machine.run(1000)
        assert machine.run(300)[best] > 270


def test_an_arm_that_became_faster_is_found_at_its_next_trial() -> None:
    """Its old times do not hide that: a step cannot be faster than it is."""
    gate = Gate(BOTH)
    for _ in range(20):
        gate.observe(Arm.PLAIN, 1, 1, 1.0)
        gate.observe(Arm.TREE, 1, 2, 3.0)
    assert gate.choose(1) == Arm.PLAIN
    gate.observe(Arm.TREE, 1, 2, 1.4)
    assert gate.costs(1)[Arm.TREE] == pytest.approx(1.4)


def test_one_lucky_copy_wins_no_steps() -> None:
    """Of the first n-gram drafts one copies 16 tokens, the others nothing; trees yield 4."""
    gate = Gate(ALL)
    gate.observe(Arm.TREE, 16, 64, 1.8)
    for tokens in (1, 1, 16, 1, 1):
        gate.observe(Arm.NGRAM, 1, tokens, 1.1)
        gate.observe(Arm.PLAIN, 1, 1, 1.0)
        gate.observe(Arm.TREE, 1, 4, 1.8)
        gate.choose(1)
        assert gate.arm == Arm.TREE


def test_text_whose_first_half_copies() -> None:
    tokens = {Arm.PLAIN: 1.0, Arm.NGRAM: 4.0, Arm.TREE: 4.2}
    machine = Machine(Gate(ALL), flat(plain=1.0, ngram=1.2, tree=2.0), tokens)
    machine.run(400)
    assert machine.run(300)[Arm.NGRAM] > 240
    tokens |= {Arm.NGRAM: 1.0, Arm.TREE: 2.6}
    machine.run(300)
    assert machine.run(300)[Arm.TREE] > 200


def test_one_arm_is_always_taken() -> None:
    for arm in (Arm.PLAIN, Arm.TREE):
        gate = Gate((arm,))
        for _ in range(20):
            assert gate.choose(3) == arm
            gate.observe(arm, 3, 3, 1.0)
        assert (gate.gain(3) is None) == (arm != Arm.PLAIN)


def test_gain_is_the_ratio_of_two_measured_rates() -> None:
    gate = Gate(BOTH)
    assert gate.gain(1) is None
    machine = Machine(gate, flat(plain=1.0, tree=2.0), {Arm.PLAIN: 1.0, Arm.TREE: 3.0}, noise=0.0)
    machine.run(1)
    assert gate.gain(1) is None
    machine.run(400)
    assert gate.gain(1) == pytest.approx(1.5, rel=0.25)


def test_ngram_tokens_is_the_break_even() -> None:
    gate = Gate(ALL)
    assert gate.ngram_tokens(1) is None
    for _ in range(9):
        gate.observe(Arm.PLAIN, 1, 1, 1.0)
        gate.observe(Arm.NGRAM, 1, 1, 1.5)
        gate.observe(Arm.TREE, 1, 4, 3.0)
    assert gate.ngram_tokens(1) == pytest.approx(4.0 / 3.0 * 1.5)
