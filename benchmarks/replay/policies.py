# SPDX-License-Identifier: Apache-2.0
"""The policies that replay compares."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from benchmarks.replay.controller import (
    Budget,
    Rule,
    best_size,
    budget_of,
    choose_budget,
    order_scores,
    speedup_curve,
)
from benchmarks.replay.path_scores import PathScoreCorrection
from benchmarks.replay.simulation import Corpus, Outcome
from benchmarks.replay.steps import StepTree, beam_accepted, best_first, chain_accepted
from vllm_bastion.policy.cost.online import LatencyModel
from vllm_bastion.policy.gate import DraftGate


@dataclass
class Plain:
    """One token per request and step, nothing drafted."""

    name: str = "plain"

    def step(self, steps: Sequence[int], context_len: float) -> Outcome:
        """See `Policy`."""
        return Outcome([0] * len(steps), 0, drafted=False)

    def timed(self, rows: int, num_reqs: int, context_len: float, forward_ms: float) -> None:
        """Nothing to learn."""


@dataclass
class Chain:
    """The best child at every depth: what vLLM's own drafter has verified."""

    corpus: Corpus
    name: str = "chain"

    def step(self, steps: Sequence[int], context_len: float) -> Outcome:
        """See `Policy`."""
        corpus = self.corpus
        accepted = [chain_accepted(corpus.scores(s), corpus.ranks[s]) for s in steps]
        return Outcome(accepted, len(steps) * self.corpus.recording.depth)

    def timed(self, rows: int, num_reqs: int, context_len: float, forward_ms: float) -> None:
        """Nothing to learn."""


@dataclass
class Beam:
    """`width` nodes at every depth."""

    corpus: Corpus
    width: int

    @property
    def name(self) -> str:
        """E.g. beam 4x15."""
        return f"beam {self.width}x{self.corpus.recording.depth}"

    def step(self, steps: Sequence[int], context_len: float) -> Outcome:
        """See `Policy`."""
        corpus = self.corpus
        accepted = [beam_accepted(corpus.scores(s), corpus.ranks[s], self.width) for s in steps]
        # the first level has no more than K nodes
        depth, top_k = corpus.recording.topk_tokens.shape[1:]
        nodes = min(self.width, top_k) + (depth - 1) * self.width
        return Outcome(accepted, len(steps) * nodes)

    def timed(self, rows: int, num_reqs: int, context_len: float, forward_ms: float) -> None:
        """Nothing to learn."""


@dataclass
class Fixed:
    """The best `nodes` nodes of every request."""

    corpus: Corpus
    nodes: int

    @property
    def name(self) -> str:
        """E.g. fixed 64."""
        return f"fixed {self.nodes}"

    def step(self, steps: Sequence[int], context_len: float) -> Outcome:
        """See `Policy`."""
        trees = [self.corpus.tree(step) for step in steps]
        total = sum(min(self.nodes, len(tree.rho)) for tree in trees)
        return Outcome([tree.accepted(self.nodes) for tree in trees], total)

    def timed(self, rows: int, num_reqs: int, context_len: float, forward_ms: float) -> None:
        """Nothing to learn."""


Timing = Literal["exact", "lagged"]


@dataclass
class _Trees:
    """What the gate is to learn of one step's trees; nothing of a step without."""

    requests: list[int] = field(default_factory=list)
    # Of each request the nodes that its scores ask for, and the tokens that those promise.
    nodes: list[int] = field(default_factory=list)
    promised: list[float] = field(default_factory=list)
    # Tokens accepted in all.
    accepted: int = 0


class Adaptive:
    """The controller, as the engine runs it (`vllm_bastion/engine/verification.py`, `lagged.py`).

    Args:
        corpus: trees and outcomes.
        latency: what the controller believes.
        max_nodes: N_max of every request.
        rule: `argmax`, or the paper's `first_decrease`.
        timing: `exact` sizes a step by its own scores. `lagged` takes the nodes per request that
            the scores of the step before asked for, and fills them with this step's best nodes;
            the gate hears of everything a step later, too.
        shared: whether the batch's nodes compete; else every request maximises its own S(N) on the
            cost of a batch of one.
        correction: learn and use corrected path scores, of a corpus without transitions.
        plain: whether plain decoding is a candidate.
    """

    def __init__(
        self,
        corpus: Corpus,
        latency: LatencyModel,
        *,
        name: str = "adaptive",
        max_nodes: int | None = None,
        rule: Rule = "argmax",
        timing: Timing = "exact",
        shared: bool = True,
        correction: PathScoreCorrection | None = None,
        plain: bool = True,
    ) -> None:
        self.name = name
        self.corpus = corpus
        self.latency = latency
        self.max_nodes = max_nodes or corpus.max_nodes
        self.shared = shared
        self.rule: Rule = rule
        self.lag = int(timing == "lagged")
        # nodes per request that the last scores to be heard of asked for
        self._per_request = float(self.max_nodes)
        self._history = deque([_Trees() for _ in range(2 + self.lag)], 2 + self.lag)
        self.correction = correction
        self.gate = DraftGate() if plain else None
        self._drafted = True
        # (A-hat, accepted) of every request and step that had a tree
        self.predictions: list[tuple[float, int]] = []
        self.decision_s: list[float] = []

    def step(self, steps: Sequence[int], context_len: float) -> Outcome:
        """See `Policy`."""
        requests = self._requests(steps)
        self._history.append(_Trees())
        if self.lag:
            self._hear(requests)
        self._decide_drafting(steps, context_len, arrived=True)
        outcome = Outcome([0] * len(steps), 0, drafted=False)
        if self._drafted:
            trees = [self._tree(step) for step in steps]
            wanted, budget = self._decide(trees, context_len)
            accepted = [tree.accepted(int(n)) for tree, n in zip(trees, budget.counts, strict=True)]
            promised = [_promise(tree, n) for tree, n in zip(trees, budget.counts, strict=True)]
            self.predictions.extend(zip(promised, accepted, strict=True))
            self._learn(steps, accepted)
            nodes = wanted.counts.tolist()
            if self.lag:
                promised = [_promise(tree, n) for tree, n in zip(trees, nodes, strict=True)]
            self._history[-1] = _Trees(requests, nodes, promised, sum(accepted))
            outcome = Outcome(accepted, budget.num_nodes)
        if not self.lag:
            self._hear(requests)
        self._decide_drafting(steps, context_len)
        return outcome

    def _hear(self, present: Sequence[int]) -> None:
        """What the engine knows at this step, at this lag."""
        before, trees = self._history[0], self._history[1]
        if trees.nodes:
            self._per_request = sum(trees.nodes) / len(trees.nodes)
        if self.gate is None:
            return
        if before.nodes:
            self.gate.realised(sum(before.promised), before.accepted)
        rows = [r for r, name in enumerate(trees.requests) if name in present]
        self.gate.promised(
            [trees.requests[r] for r in rows],
            [trees.promised[r] for r in rows],
            [trees.nodes[r] for r in rows],
        )

    def timed(self, rows: int, num_reqs: int, context_len: float, forward_ms: float) -> None:
        """See `Policy`."""
        self.latency.observe(rows, num_reqs, context_len, forward_ms)

    def _requests(self, steps: Sequence[int]) -> list[int]:
        return [int(q) for q in self.corpus.recording.step_requests[list(steps)]]

    def _decide_drafting(
        self, steps: Sequence[int], context_len: float, *, arrived: bool = False
    ) -> None:
        """Whether the next step has trees; `arrived`: asked again if the batch has new requests.

        The engine drafts behind a prompt's last chunk too, and for the whole batch.
        """
        if self.gate is None:
            return
        requests = self._requests(steps)
        if arrived:
            positions = self.corpus.recording.step_positions[list(steps)]
            new = [name for name, at in zip(requests, positions, strict=True) if at == 1]
            for name in new:
                self.gate.forget(name)
            if not new:
                return
        num_reqs = len(steps)
        self._drafted = self.gate.draft(
            requests,
            self.latency.cycle_cost_ms(num_reqs, context_len),
            self.latency.plain_ms(num_reqs, context_len),
        )

    def _tree(self, step: int) -> StepTree:
        if self.correction is None:
            return self.corpus.tree(step)
        logprobs = self.correction.apply(self.corpus.recording.topk_logprobs[step])
        return best_first(logprobs, self.corpus.ranks[step], self.max_nodes)

    def _decide(self, trees: list[StepTree], context_len: float) -> tuple[Budget, Budget]:
        """What the step's own scores ask for, and what is verified."""
        rho = np.zeros((len(trees), self.max_nodes))
        limits = []
        for row, tree in zip(rho, trees, strict=True):
            used = min(len(tree.rho), self.max_nodes)
            row[:used] = tree.rho[:used]
            limits.append(used)
        start = time.perf_counter()
        if self.shared:
            num_reqs = len(limits)
            order = order_scores(rho, limits)
            cost = self.latency.cycle_cost_ms(num_reqs, context_len)
            n = best_size(speedup_curve(order, cost, num_reqs), self.rule)
            wanted = budget = budget_of(order, n, cost, num_reqs)
            if self.lag:
                n = min(round(self._per_request * num_reqs), len(order.rows))
                budget = budget_of(order, n, cost, num_reqs)
        else:
            wanted = budget = self._decide_alone(rho, limits, context_len)
        self.decision_s.append(time.perf_counter() - start)
        return wanted, budget

    def _decide_alone(self, rho: np.ndarray, limits: Sequence[int], context_len: float) -> Budget:
        alone = self.latency.cycle_cost_ms(1, context_len)
        parts = [
            choose_budget(rho[r : r + 1], limits[r : r + 1], alone, 1, self.rule)
            for r in range(len(limits))
        ]
        counts = np.concatenate([part.counts for part in parts])
        cost = self.latency.cycle_cost_ms(len(limits), context_len)
        rows = min(len(limits) + int(counts.sum()), len(cost) - 1)
        return Budget(counts, sum(part.expected_tokens for part in parts), float(cost[rows]))

    def _learn(self, steps: Sequence[int], accepted: Sequence[int]) -> None:
        if self.correction is None:
            return
        for step, hit in zip(steps, accepted, strict=True):
            ranks = self.corpus.ranks[step][: hit + 1]
            self.correction.observe(self.corpus.recording.topk_logprobs[step], ranks)


def _promise(tree: StepTree, nodes: int) -> float:
    return float(tree.rho[:nodes].sum())
