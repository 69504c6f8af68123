# SPDX-License-Identifier: Apache-2.0
"""The policies that replay compares."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.replay.controller import choose_budget
from benchmarks.replay.simulation import Corpus, Outcome, Policy
from benchmarks.replay.steps import IntArray, StepTree
from vllm_bastion.policy.controller import Batch, Controller, Decision
from vllm_bastion.policy.cost.latency import LatencyModel
from vllm_bastion.step_times import StepTimes


@dataclass
class Plain(Policy):
    name: str = "plain"

    def step(self, steps: Sequence[int], context_len: float) -> Outcome:
        return Outcome([0] * len(steps), 0, drafted=False)


@dataclass
class Fixed(Policy):
    """The best `nodes` nodes of every request."""

    corpus: Corpus
    nodes: int

    def __post_init__(self) -> None:
        self.name = f"fixed {self.nodes}"

    def step(self, steps: Sequence[int], context_len: float) -> Outcome:
        trees = [self.corpus.tree(step) for step in steps]
        total = sum(min(self.nodes, len(tree.rho)) for tree in trees)
        return Outcome([tree.accepted(self.nodes) for tree in trees], total)


@dataclass
class _Trees:
    """The trees of one step, as the controller observes them; empty for a step without trees."""

    requests: list[int] = field(default_factory=list)
    # Per request: the nodes that its scores call for, and the tokens expected from them.
    nodes: list[int] = field(default_factory=list)
    promised: list[float] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)


class Adaptive(Policy):
    """The product's controller plans each step; recorded trees are cut to `choose_budget`'s size.

    A request is a slot.

    Args:
        max_nodes: N_max of every request.
        lagged: size a step by the scores of the step before, and fill it with its own best nodes;
            the controller observes everything one step later, too. If not, a step's own scores
            size it.
        plain: whether a step may be plain decoding.
    """

    def __init__(
        self,
        corpus: Corpus,
        latency: LatencyModel,
        *,
        name: str = "adaptive",
        max_nodes: int | None = None,
        lagged: bool = False,
        plain: bool = True,
    ) -> None:
        self.corpus, self.name = corpus, name
        self.max_nodes = max_nodes or corpus.max_nodes
        self._plans, self._lagged = plain, lagged
        slots = len(corpus.recording.request_ids)
        self.controller = Controller(corpus.recording.depth, slots, latency)
        self._decision = Decision(True, "nothing is known")
        self._history = deque([_Trees() for _ in range(2 + lagged)], 2 + lagged)

    def step(self, steps: Sequence[int], context_len: float) -> Outcome:
        recording, remaining = self.corpus.recording, self.corpus.remaining[list(steps)]
        slots = recording.step_requests[list(steps)].astype(np.int64)
        positions = recording.step_positions[list(steps)]
        self._history.append(_Trees())
        if self._lagged:
            self._observe(slots)
        if self._plans and (positions == 1).any():
            for slot in slots[positions == 1].tolist():
                self.controller.restart(slot, 0)
            # The engine also drafts after a prompt's last chunk, for the whole batch.
            self._plan(slots, remaining, len(steps), context_len)
        outcome = Outcome([0] * len(steps), 0, drafted=False)
        if self._decision.drafts:
            outcome = self._verify(steps, slots, context_len)
        if not self._lagged:
            self._observe(slots)
        if self._plans:
            # The engine decides before it knows what a step emits: one token at least.
            goes_on = remaining > 1
            self._plan(slots[goes_on], remaining[goes_on] - 1, len(steps), context_len)
        return outcome

    def ends_with_draft(self, drafted: bool) -> bool:
        return self._decision.drafts

    def timed(self, step: StepTimes) -> None:
        self.controller.observe([step])

    def _plan(
        self, slots: IntArray, remaining: IntArray, num_reqs: int, context_len: float
    ) -> None:
        batch = Batch(slots.tolist(), remaining.tolist(), num_reqs, context_len)
        self._decision = self.controller.plan(batch)

    def _verify(self, steps: Sequence[int], slots: IntArray, context_len: float) -> Outcome:
        trees = [self.corpus.tree(step) for step in steps]
        wanted, verified = self._sizes(trees, slots, context_len)
        accepted = [tree.accepted(n) for tree, n in zip(trees, verified, strict=True)]
        expected = [float(tree.rho[:n].sum()) for tree, n in zip(trees, wanted, strict=True)]
        self._history[-1] = _Trees(slots.tolist(), wanted, expected, accepted)
        return Outcome(accepted, sum(verified))

    def _observe(self, present: IntArray) -> None:
        """Pass what the engine knows at this step to the controller."""
        before, trees = self._history[0], self._history[1]
        gains = self.controller.gains
        if trees.nodes:
            promised = np.dot([gains.kappa_of(q) for q in trees.requests], trees.promised)
            self.controller.size.observe(sum(trees.nodes), len(trees.nodes), float(promised))
        gains.add_outcomes(before.requests, before.promised, before.accepted)
        rows = [r for r, name in enumerate(trees.requests) if name in present]
        gains.add_trees(
            [trees.requests[r] for r in rows],
            [trees.promised[r] for r in rows],
            [trees.nodes[r] for r in rows],
        )

    def _sizes(
        self, trees: list[StepTree], slots: IntArray, context_len: float
    ) -> tuple[list[int], list[int]]:
        """The nodes that the step's own scores call for, and those that are verified."""
        num_reqs, latency = len(trees), self.controller.latency
        rho = np.zeros((num_reqs, self.max_nodes))
        limits = [min(len(tree.rho), self.max_nodes) for tree in trees]
        for row, tree, slot, used in zip(rho, trees, slots.tolist(), limits, strict=True):
            row[:used] = self.controller.gains.kappa_of(slot) * tree.rho[:used]
        cost = latency.estimate(num_reqs, context_len).tree_ms
        wanted = budget = choose_budget(rho, limits, cost, num_reqs)
        if self._lagged:
            most, size = min(sum(limits), len(cost) - 1 - num_reqs), self.controller.size
            graphs = np.array(latency.table.captured_sizes, dtype=np.int64)
            n = size.choose(num_reqs, num_reqs, num_reqs, most, cost, graphs)
            budget = choose_budget(rho, limits, cost, num_reqs, n)
        return wanted.counts.tolist(), budget.counts.tolist()
