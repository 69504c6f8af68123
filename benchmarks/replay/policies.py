# SPDX-License-Identifier: Apache-2.0
"""The policies that replay compares."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.replay.controller import choose_budget
from benchmarks.replay.simulation import Corpus, Outcome, Policy
from benchmarks.replay.steps import StepTree
from benchmarks.replay.table import StepCostTable
from vllm_bastion.scheduler.gate import Arm, Gate, size_class


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


class Gated(Policy):
    """The product: its gate decides whether a step drafts, the argmax of its budget how many nodes.

    The budget starts from the costs of `table`, which the gate's times correct.

    Args:
        max_nodes: N_max of every request.
        lagged: size a step by the scores of the step before, and fill it with its own best nodes;
            the gate sees a step's output one step later, too.
        plain: whether a step may be plain decoding.
    """

    def __init__(
        self,
        corpus: Corpus,
        table: StepCostTable,
        *,
        name: str = "adaptive",
        max_nodes: int | None = None,
        lagged: bool = False,
        plain: bool = True,
    ) -> None:
        self.corpus, self.table, self.name, self._lagged = corpus, table, name, lagged
        self.max_nodes = max_nodes or corpus.max_nodes
        self.gate = Gate((Arm.PLAIN, Arm.TREE) if plain else (Arm.TREE,))
        self._verified = self._ends_with = Arm.TREE
        self._outputs: deque[tuple[Arm, int, int, float]] = deque()
        self._predicted: dict[int, float] = {}  # mean of the table's ms, by size class
        self._wanted: tuple[int, int] | None = None  # requests and nodes of the step before
        self._reqs = self._tokens = 0

    def step(self, steps: Sequence[int], context_len: float) -> Outcome:
        reqs = self._reqs = len(steps)
        self._verified, self._ends_with = self._ends_with, self.gate.choose(reqs)
        outcome = Outcome([0] * reqs, 0, drafted=False)
        if self._verified == Arm.TREE:
            trees = [self.corpus.tree(step) for step in steps]
            counts = self._counts(trees, context_len)
            accepted = [tree.accepted(n) for tree, n in zip(trees, counts, strict=True)]
            outcome = Outcome(accepted, sum(counts))
        self._tokens = reqs + sum(outcome.accepted)
        return outcome

    def ends_with_draft(self, drafted: bool) -> bool:
        return self._ends_with == Arm.TREE

    def timed(self, ms: float) -> None:
        clean = self._verified == self._ends_with
        self._outputs.append((self._verified, self._reqs, self._tokens, ms if clean else 0.0))
        if len(self._outputs) > self._lagged:
            self.gate.observe(*self._outputs.popleft())

    def _counts(self, trees: list[StepTree], context_len: float) -> list[int]:
        """Nodes to verify of each request."""
        reqs, size = len(trees), size_class(len(trees))
        rho = np.zeros((reqs, self.max_nodes))
        limits = [min(len(tree.rho), self.max_nodes) for tree in trees]
        for row, tree, used in zip(rho, trees, limits, strict=True):
            row[:used] = tree.rho[:used]
        costs = self.table.tree_step_ms(reqs, context_len)
        real, mean = self.gate.ms(Arm.TREE, reqs), self._predicted.get(size)
        corrected = costs
        if real is not None and mean is not None:
            corrected = np.maximum(costs + real - mean, 0.1 * costs)
        wanted = budget = choose_budget(rho, limits, corrected, reqs)
        if self._lagged and self._wanted is not None and self._wanted[0] == reqs:
            budget = choose_budget(rho, limits, corrected, reqs, min(self._wanted[1], sum(limits)))
        self._wanted = reqs, wanted.num_nodes
        ms = float(costs[min(reqs + budget.num_nodes, len(costs) - 1)])
        before = self._predicted.setdefault(size, ms)
        self._predicted[size] = before + 0.1 * (ms - before)
        return budget.counts.tolist()
