# SPDX-License-Identifier: Apache-2.0
"""The replay loop: decode the requests of a recording under a policy, timed by a cost table.

A policy sees what the engine would see (scores before the step, timings after it) and chooses the
nodes. The recording says how many of them are accepted. Every policy emits the same tokens, so
times compare directly. In a batch, a finished request is replaced until the queue is empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np

from benchmarks.replay.recording import Recording
from benchmarks.replay.steps import StepTree, best_first, target_ranks
from benchmarks.replay.table import StepCostTable


@dataclass(frozen=True)
class Request:
    """One request of a recording: positions 1 .. last, one recorded step each."""

    domain: str
    first_step: int
    last: int


class Corpus:
    """The requests of one temperature and their trees, which are expanded on first use."""

    def __init__(self, recording: Recording, max_nodes: int, temperature: float | None = None):
        self.recording = recording
        self.max_nodes = max_nodes
        self.ranks = target_ranks(recording)
        self._trees: list[StepTree | None] = [None] * recording.num_steps
        self.requests: list[Request] = []
        # [steps] tokens that a request still emits, from that step on.
        self.remaining = np.zeros(recording.num_steps, dtype=np.int64)
        for q in range(len(recording.request_ids)):
            if temperature is not None and recording.temperatures[q] != np.float32(temperature):
                continue
            steps = np.flatnonzero(recording.step_requests == q)
            if not len(steps):
                continue
            positions = recording.step_positions[steps]
            if not np.array_equal(positions, np.arange(1, len(steps) + 1)):
                raise ValueError(
                    f"request {recording.request_ids[q]} has no step at some position; record "
                    "with one token per step"
                )
            self.remaining[steps] = positions[::-1]
            self.requests.append(Request(recording.domains[q], int(steps[0]), int(positions[-1])))

    @property
    def domains(self) -> list[str]:
        return list(dict.fromkeys(request.domain for request in self.requests))

    def of_domain(self, name: str) -> list[Request]:
        return [request for request in self.requests if request.domain == name]

    def interleaved(self) -> list[Request]:
        """All requests, alternating between the domains."""
        turns = zip_longest(*map(self.of_domain, self.domains))
        return [request for turn in turns for request in turn if request is not None]

    def tree(self, step: int) -> StepTree:
        tree = self._trees[step]
        if tree is None:
            logprobs = self.recording.topk_logprobs[step]
            tree = best_first(logprobs, self.ranks[step], self.max_nodes)
            self._trees[step] = tree
        return tree


@dataclass(frozen=True)
class Outcome:
    # [R] draft tokens accepted
    accepted: Sequence[int]
    # draft nodes verified, whole batch
    nodes: int
    # whether the step pays for a pass of the drafter
    drafted: bool = True


class Policy:
    name: str  # the row in the tables

    def step(self, steps: Sequence[int], context_len: float) -> Outcome:
        """One step of the batch whose recorded steps are `steps`."""
        raise NotImplementedError

    def ends_with_draft(self, drafted: bool) -> bool:
        """Whether the last step of an engine would have ended with a draft, for the next one.

        drafted: whether the recorded step was charged with one, for itself.
        """
        return drafted

    def timed(self, ms: float) -> None:
        """The time of that step, as the engine measures it; by default nothing is learned."""


@dataclass
class Truth:
    """What steps really cost: the table, what it does not tell the policy, and noise.

    Args:
        table: the undisturbed cost.
        plain, tree: factors on a whole step of either kind.
        noise: standard deviation of a step's time, relative.
        stalls: probability that a step takes ten times as long.
    """

    table: StepCostTable
    plain: float = 1.0
    tree: float = 1.0
    noise: float = 0.0
    stalls: float = 0.0
    seed: int = 0
    _rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)

    def step_ms(
        self, rows: int, num_reqs: int, context_len: float, drafted: bool, ends_with_draft: bool
    ) -> tuple[float, float]:
        """What a step takes in ms with its own draft, and what is measured with the next one's."""
        table = self.table
        forward = float(table.forward_ms(num_reqs, context_len)[min(rows, table.max_rows)])
        draft_ms = self.tree * table.drafter_ms(num_reqs)
        if drafted:
            undrafted_ms = self.tree * (forward + table.aux_ms)
        else:
            undrafted_ms = self.plain * (forward + table.plain_aux_ms)
        total = undrafted_ms + drafted * draft_ms
        error = max(0.1, 1.0 + self.noise * self._rng.standard_normal()) if self.noise else 1.0
        if self.stalls and self._rng.random() < self.stalls:
            error *= 10.0
        # Noise and stalls affect only what is measured, not what policies are compared by.
        return total, error * (undrafted_ms + ends_with_draft * draft_ms)


@dataclass
class Result:
    """Sums over a replay."""

    name: str
    ms: float = 0.0
    tokens: int = 0
    steps: int = 0
    request_steps: int = 0
    nodes: int = 0

    @property
    def tau(self) -> float:
        return self.tokens / self.request_steps

    @property
    def mean_nodes(self) -> float:
        return self.nodes / self.request_steps


def simulate(
    corpus: Corpus,
    policy: Policy,
    truth: Truth,
    *,
    requests: Sequence[Request] | None = None,
    batch: int = 1,
) -> Result:
    """Decode `requests` (default: all, alternating domains) with at most `batch` at a time."""
    queue = list(corpus.interleaved() if requests is None else requests)
    queue.reverse()
    contexts = corpus.recording.context_lens
    result = Result(policy.name)
    active: list[list[int]] = []  # [a request's first step, its position, its last position]
    while queue or active:
        while queue and len(active) < batch:
            request = queue.pop()
            active.append([request.first_step, 1, request.last])
        steps = [first + position - 1 for first, position, _ in active]
        context = float(np.mean(contexts[steps]))
        outcome = policy.step(steps, context)
        rows = len(active) + outcome.nodes
        ends_with_draft = policy.ends_with_draft(outcome.drafted)
        ms, measured = truth.step_ms(rows, len(active), context, outcome.drafted, ends_with_draft)
        policy.timed(measured)
        result.ms += ms
        result.steps += 1
        result.request_steps += len(active)
        result.nodes += outcome.nodes
        for row, accepted in zip(active, outcome.accepted, strict=True):
            emitted = min(accepted + 1, row[2] + 1 - row[1])
            row[1] += emitted
            result.tokens += emitted
        active = [row for row in active if row[1] <= row[2]]
    return result
