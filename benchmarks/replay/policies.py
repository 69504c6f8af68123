# SPDX-License-Identifier: Apache-2.0
"""The policies that replay compares."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from benchmarks.replay.controller import Budget, choose_budget
from benchmarks.replay.simulation import Corpus, Outcome, Policy
from benchmarks.replay.steps import StepTree, beam_accepted, chain_accepted
from vllm_bastion.policy.controller import Batch, Controller
from vllm_bastion.policy.cost.latency import LatencyModel
from vllm_bastion.step_times import StepTimes


@dataclass
class Plain(Policy):
    name: str = "plain"

    def step(self, steps: Sequence[int], context_len: float) -> Outcome:
        return Outcome([0] * len(steps), 0, drafted=False)


@dataclass
class Chain(Policy):
    """The best child at every depth: the chain that vLLM's own drafters verify."""

    corpus: Corpus
    name: str = "chain"

    def step(self, steps: Sequence[int], context_len: float) -> Outcome:
        corpus = self.corpus
        accepted = [chain_accepted(corpus.scores(s), corpus.ranks[s]) for s in steps]
        return Outcome(accepted, len(steps) * self.corpus.recording.depth)


@dataclass
class Beam(Policy):
    """`width` nodes at every depth."""

    corpus: Corpus
    width: int

    def __post_init__(self) -> None:
        self.name = f"beam {self.width}x{self.corpus.recording.depth}"

    def step(self, steps: Sequence[int], context_len: float) -> Outcome:
        corpus = self.corpus
        accepted = [beam_accepted(corpus.scores(s), corpus.ranks[s], self.width) for s in steps]
        # the first level has at most K nodes
        depth, top_k = corpus.recording.topk_tokens.shape[1:]
        nodes = min(self.width, top_k) + (depth - 1) * self.width
        return Outcome(accepted, len(steps) * nodes)


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


Timing = Literal["exact", "lagged"]


@dataclass
class _Trees:
    """The trees of one step, as the controller observes them; empty for a step without trees."""

    requests: list[int] = field(default_factory=list)
    # Per request: the nodes that its scores call for, and the tokens expected from them.
    nodes: list[int] = field(default_factory=list)
    promised: list[float] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)


class Adaptive(Policy):
    """The controller as the engine runs it (`vllm_bastion/engine/verification.py`, `lagged.py`).

    Args:
        corpus: trees and outcomes.
        latency: the controller's cost model.
        max_nodes: N_max of every request.
        timing: `exact` sizes a step by its own scores. `lagged` sizes it by those of the step
            before, and fills it with this step's best nodes; the controller observes everything one
            step later, too.
        shared: whether the batch's nodes compete; if not, every request maximises its own S(N) on
            the cost of a batch of one.
        plain: whether a step may be plain decoding.
    """

    def __init__(
        self,
        corpus: Corpus,
        latency: LatencyModel,
        *,
        name: str = "adaptive",
        max_nodes: int | None = None,
        timing: Timing = "exact",
        shared: bool = True,
        plain: bool = True,
    ) -> None:
        self.name = name
        self.corpus = corpus
        self.latency = latency
        self.max_nodes = max_nodes or corpus.max_nodes
        self.shared = shared
        self.lag = int(timing == "lagged")
        self._history = deque([_Trees() for _ in range(2 + self.lag)], 2 + self.lag)
        num_slots = len(corpus.recording.request_ids)
        self.controller = Controller(corpus.recording.depth, num_slots, latency)
        self._plain = plain
        self._graphs = np.array(latency.table.captured_sizes, dtype=np.int64)
        self._drafted = True
        # (A-hat, accepted) of every request and step that had a tree
        self.predictions: list[tuple[float, int]] = []

    def step(self, steps: Sequence[int], context_len: float) -> Outcome:
        requests = self._requests(steps)
        self._history.append(_Trees())
        if self.lag:
            self._observe(requests)
        self._decide_drafting(steps, context_len, arrived=True)
        outcome = Outcome([0] * len(steps), 0, drafted=False)
        if self._drafted:
            trees = [self.corpus.tree(step) for step in steps]
            wanted, budget = self._decide(trees, requests, context_len)
            accepted = [tree.accepted(int(n)) for tree, n in zip(trees, budget.counts, strict=True)]
            promised = [_promise(tree, n) for tree, n in zip(trees, budget.counts, strict=True)]
            self.predictions.extend(zip(promised, accepted, strict=True))
            nodes = wanted.counts.tolist()
            if self.lag:
                promised = [_promise(tree, n) for tree, n in zip(trees, nodes, strict=True)]
            self._history[-1] = _Trees(requests, nodes, promised, list(accepted))
            outcome = Outcome(accepted, budget.num_nodes)
        if not self.lag:
            self._observe(requests)
        self._decide_drafting(steps, context_len)
        return outcome

    def _observe(self, present: Sequence[int]) -> None:
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

    def timed(self, step: StepTimes) -> None:
        """See `Policy`. A recorded step drafts for itself, the engine's for the next one."""
        self.controller.observe([replace(step, drafted=self._drafted)])

    def _requests(self, steps: Sequence[int]) -> list[int]:
        return [int(q) for q in self.corpus.recording.step_requests[list(steps)]]

    def _decide_drafting(
        self, steps: Sequence[int], context_len: float, *, arrived: bool = False
    ) -> None:
        """Decide if the next step has trees; with `arrived`, only if the batch has new requests.

        The engine also drafts after a prompt's last chunk, for the whole batch.
        """
        if not self._plain:
            return
        requests = self._requests(steps)
        if arrived:
            positions = self.corpus.recording.step_positions[list(steps)]
            new = [name for name, at in zip(requests, positions, strict=True) if at == 1]
            for name in new:
                self.controller.restart(name, 0)
            if not new:
                return
        # The engine decides before it knows what a step emits: one token at least.
        left = [self.corpus.remaining(step) - (not arrived) for step in steps]
        rows = [row for row, tokens in enumerate(left) if tokens > 0]
        batch = Batch(
            [requests[row] for row in rows], [left[row] for row in rows], len(steps), context_len
        )
        self._drafted = self.controller.plan(batch).drafts

    def _decide(
        self, trees: list[StepTree], requests: list[int], context_len: float
    ) -> tuple[Budget, Budget]:
        """The budget that the step's own scores call for, and the one that is verified."""
        rho = np.zeros((len(trees), self.max_nodes))
        limits = []
        for row, tree, request in zip(rho, trees, requests, strict=True):
            used = min(len(tree.rho), self.max_nodes)
            row[:used] = self.controller.gains.kappa_of(request) * tree.rho[:used]
            limits.append(used)
        if not self.shared:
            alone = self._decide_alone(rho, limits, context_len)
            return alone, alone
        num_reqs = len(limits)
        cost = self.latency.estimate(num_reqs, context_len).tree_ms
        wanted = budget = choose_budget(rho, limits, cost, num_reqs)
        if self.lag:
            most = min(sum(limits), len(cost) - 1 - num_reqs)
            n = self.controller.size.choose(num_reqs, num_reqs, num_reqs, most, cost, self._graphs)
            budget = choose_budget(rho, limits, cost, num_reqs, n)
        return wanted, budget

    def _decide_alone(self, rho: np.ndarray, limits: Sequence[int], context_len: float) -> Budget:
        alone = self.latency.estimate(1, context_len).tree_ms
        parts = [
            choose_budget(rho[r : r + 1], limits[r : r + 1], alone, 1) for r in range(len(limits))
        ]
        counts = np.concatenate([part.counts for part in parts])
        cost = self.latency.estimate(len(limits), context_len).tree_ms
        rows = min(len(limits) + int(counts.sum()), len(cost) - 1)
        return Budget(counts, sum(part.expected_tokens for part in parts), float(cost[rows]))


def _promise(tree: StepTree, nodes: int) -> float:
    return float(tree.rho[:nodes].sum())
