# SPDX-License-Identifier: Apache-2.0
"""The policies that replay compares."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from benchmarks.replay.costs import Costs
from benchmarks.replay.simulation import Corpus, Outcome, Policy
from benchmarks.replay.trees import StepTree
from vllm_bastion.scheduler.gate import Arm, Gate, size_class
from vllm_bastion.scheduler.step_line import StepLine, corrected


class Plain(Policy):
    def step(self, steps: Sequence[int]) -> Outcome:
        return Outcome([0] * len(steps), 0, drafted=False)


class Fixed(Policy):
    """The best `nodes` nodes of every request."""

    def __init__(self, corpus: Corpus, nodes: int) -> None:
        self._corpus, self._nodes = corpus, nodes

    def step(self, steps: Sequence[int]) -> Outcome:
        trees = [self._corpus.tree(step) for step in steps]
        total = sum(min(self._nodes, len(tree.rho)) for tree in trees)
        return Outcome([tree.accepted(self._nodes) for tree in trees], total)


class Gated(Policy):
    """The product: its gate decides whether a step drafts, the argmax of its budget how many nodes.

    The budget starts from `costs`, which the gate's times correct.

    Args:
        max_nodes: N_max of every request.
        lagged: size a step by the scores of the step before, and fill it with its own best nodes;
            the gate sees a step's output one step later, too.
    """

    def __init__(
        self, corpus: Corpus, costs: Costs, *, max_nodes: int = 255, lagged: bool = False
    ) -> None:
        self._corpus, self._costs, self._lagged = corpus, costs, lagged
        self._max_nodes = min(max_nodes, corpus.max_nodes)
        self._gate = Gate((Arm.PLAIN, Arm.TREE))
        self._verified = self._ends_with = Arm.TREE
        self._outputs: deque[tuple[float, tuple[Arm, int, int, float]]] = deque()
        self._lines = defaultdict[int, StepLine](StepLine)  # by size class
        self._predicted = 0.0  # ms of the step
        self._wanted: tuple[int, int] | None = None  # requests and nodes of the step before
        self._reqs = self._tokens = 0

    def step(self, steps: Sequence[int]) -> Outcome:
        reqs = self._reqs = len(steps)
        self._verified, self._ends_with = self._ends_with, self._gate.choose(reqs)
        outcome = Outcome([0] * reqs, 0, drafted=False)
        if self._verified == Arm.TREE:
            trees = [self._corpus.tree(step) for step in steps]
            counts = self._counts(trees)
            accepted = [tree.accepted(n) for tree, n in zip(trees, counts, strict=True)]
            outcome = Outcome(accepted, sum(counts))
        self._tokens = reqs + sum(outcome.accepted)
        return outcome

    def ends_with_draft(self, drafted: bool) -> bool:
        return self._ends_with == Arm.TREE

    def timed(self, ms: float) -> None:
        clean = self._verified == self._ends_with
        seen = self._verified, self._reqs, self._tokens, ms if clean else 0.0
        self._outputs.append((self._predicted, seen))
        self._predicted = 0.0
        if len(self._outputs) > self._lagged:
            predicted, (arm, reqs, tokens, ms) = self._outputs.popleft()
            if self._gate.observe(arm, reqs, tokens, ms) and predicted:
                self._lines[size_class(reqs)].add(predicted, ms)

    def _counts(self, trees: list[StepTree]) -> list[int]:
        """Nodes to verify of each request."""
        reqs, costs = len(trees), self._costs.tree_step_ms(len(trees))
        scores = [tree.rho[: self._max_nodes] for tree in trees]
        nodes = best_total(scores, corrected(costs, self._lines[size_class(reqs)]()))
        before, self._wanted = self._wanted, (reqs, nodes)
        if self._lagged and before is not None and before[0] == reqs:
            nodes = min(before[1], sum(map(len, scores)))
        self._predicted = float(costs[reqs + nodes])
        return shares(scores, nodes)


def best_total(scores: Sequence[NDArray[np.float64]], costs_ms: NDArray[np.float64]) -> int:
    """Nodes of a batch with the most expected tokens per ms; the smallest of equals.

    Args:
        scores: of each request, non-increasing, so that any of its best nodes are a tree.
        costs_ms: of a step by its rows.
    """
    reqs, ordered = len(scores), -np.sort(-np.concatenate(scores))
    ordered = ordered[: len(costs_ms) - 1 - reqs]
    tokens = reqs + np.concatenate([[0.0], np.cumsum(ordered)])
    return int(np.argmax(tokens / costs_ms[reqs : reqs + len(tokens)]))


def shares(scores: Sequence[NDArray[np.float64]], total: int) -> list[int]:
    """Each request's nodes if the batch gets its `total` best ones."""
    owners = np.repeat(np.arange(len(scores)), [len(one) for one in scores])
    order = np.argsort(-np.concatenate(scores), kind="stable")
    counts: list[int] = np.bincount(owners[order[:total]], minlength=len(scores)).tolist()
    return counts
