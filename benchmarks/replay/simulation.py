# SPDX-License-Identifier: Apache-2.0
"""The replay loop: decode the requests of a recording under a policy, timed by costs.

A policy sees what the engine would see (scores before the step, times after it) and chooses the
nodes. The recording says how many of them are accepted. Every policy emits the same tokens, so
times compare directly. In a batch, a finished request is replaced until the queue is empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from benchmarks.replay.costs import Costs
from benchmarks.replay.recording import Recording
from benchmarks.replay.trees import StepTree, best_first, target_ranks


@dataclass(frozen=True)
class Request:
    """One request of a recording: positions 1 .. last, one recorded step each."""

    domain: str
    first_step: int
    last: int


class Corpus:
    """The requests of one temperature and their trees, which are grown on first use.

    Raises ValueError: a request lacks a step at some position.
    """

    def __init__(self, recording: Recording, max_nodes: int, temperature: float = 0.0) -> None:
        self.recording, self.max_nodes = recording, max_nodes
        self._trees: dict[int, StepTree] = {}
        self.requests: list[Request] = []
        for q, domain in enumerate(recording.domains):
            steps = np.flatnonzero(recording.step_requests == q)
            if not len(steps) or recording.temperatures[q] != np.float32(temperature):
                continue
            positions = recording.step_positions[steps]
            if not np.array_equal(positions, np.arange(1, len(steps) + 1)):
                name = recording.request_ids[q]
                raise ValueError(f"request {name} lacks a step: record one token per step")
            self.requests.append(Request(domain, int(steps[0]), int(positions[-1])))

    @cached_property
    def domains(self) -> dict[str, list[Request]]:
        names = dict.fromkeys(one.domain for one in self.requests)
        return {name: [one for one in self.requests if one.domain == name] for name in names}

    def interleaved(self) -> list[Request]:
        """All requests, alternating between the domains."""
        turns = zip_longest(*self.domains.values())
        return [request for turn in turns for request in turn if request is not None]

    @cached_property
    def _ranks(self) -> NDArray[np.int64]:
        return target_ranks(self.recording)

    def tree(self, step: int) -> StepTree:
        if step not in self._trees:
            logprobs = self.recording.topk_logprobs[step]
            self._trees[step] = best_first(logprobs, self._ranks[step], self.max_nodes)
        return self._trees[step]


@dataclass(frozen=True)
class Outcome:
    """accepted: [R] draft tokens; nodes: verified, of the whole batch.

    drafted: whether the step pays for a pass of the drafter.
    """

    accepted: Sequence[int]
    nodes: int
    drafted: bool = True


class Policy:
    def step(self, steps: Sequence[int]) -> Outcome:
        """One step of the batch whose recorded steps are `steps`."""
        raise NotImplementedError

    def ends_with_draft(self, drafted: bool) -> bool:
        """Whether the last step of an engine would have ended with a draft, for the next one.

        drafted: whether the recorded step was charged with one, for itself.
        """
        return drafted

    def timed(self, ms: float) -> None:
        """The time of that step, as the engine measures it; by default nothing is learned."""


class Truth:
    """What steps really cost: the costs, what they do not tell the policy, and noise.

    Args:
        plain, tree: factors on a whole step of either kind.
        noise: standard deviation of a measured time, relative.
        stalls: probability that a step is measured ten times as long.
    """

    def __init__(
        self, costs: Costs, plain: float = 1.0, tree: float = 1.0, noise: float = 0.0,
        stalls: float = 0.0, seed: int = 0,
    ) -> None:  # fmt: skip
        self._costs, self._plain, self._tree = costs, plain, tree
        self._noise, self._stalls = noise, stalls
        self._rng = np.random.default_rng(seed)

    def step_ms(
        self, rows: int, num_reqs: int, drafted: bool, ends_with_draft: bool
    ) -> tuple[float, float]:
        """What a step takes in ms with its own draft, and what is measured with the next one's."""
        costs = self._costs
        forward = float(costs.forward_ms[min(rows, len(costs.forward_ms) - 1)])
        draft_ms = self._tree * float(costs.draft_ms[num_reqs])
        if drafted:
            undrafted_ms = self._tree * (forward + costs.aux_ms)
        else:
            undrafted_ms = self._plain * (forward + costs.plain_aux_ms)
        error = max(0.1, 1.0 + self._noise * self._rng.standard_normal())
        if self._rng.random() < self._stalls:
            error *= 10.0
        # Noise and stalls affect only what is measured, not what policies are compared by.
        return undrafted_ms + drafted * draft_ms, error * (
            undrafted_ms + ends_with_draft * draft_ms
        )


@dataclass
class Result:
    """Sums over a replay; `request_steps` counts a step once for each of its requests."""

    ms: float = 0.0
    tokens: int = 0
    steps: int = 0
    request_steps: int = 0
    nodes: int = 0


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
    result = Result()
    active: list[list[int]] = []  # [a request's first step, its position, its last position]
    while queue or active:
        while queue and len(active) < batch:
            request = queue.pop()
            active.append([request.first_step, 1, request.last])
        outcome = policy.step([first + position - 1 for first, position, _ in active])
        ends_with_draft = policy.ends_with_draft(outcome.drafted)
        reqs = len(active)
        ms, measured = truth.step_ms(reqs + outcome.nodes, reqs, outcome.drafted, ends_with_draft)
        policy.timed(measured)
        result.ms += ms
        result.steps += 1
        result.request_steps += reqs
        result.nodes += outcome.nodes
        for row, accepted in zip(active, outcome.accepted, strict=True):
            emitted = min(accepted + 1, row[2] + 1 - row[1])
            row[1] += emitted
            result.tokens += emitted
        active = [row for row in active if row[1] <= row[2]]
    return result
