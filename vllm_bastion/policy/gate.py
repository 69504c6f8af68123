# SPDX-License-Identifier: Apache-2.0
"""Whether to draft at all: decides before each step between trees and plain decoding.

The budget N* is chosen once a tree exists; the gate decides whether the next step gets trees. For
each request r it averages over that request's own trees:

    a_r   draft tokens expected to be accepted, the sum of the path scores of the verified nodes
    n_r   nodes verified
    t_r   trees averaged, at most RECENT

A batch of R requests drafts if a step with trees is expected to emit at least as many tokens as
plain steps emit in the same time:

    R + kappa sum_r a_r (1 + HOPE / t_r)   >=   R C(R + sum_r n_r) / C_plain

C(n) is the cost of a step with a draft and n target rows, C_plain that of a plain step, in which
each request emits one token. kappa is the ratio of accepted to promised draft tokens over recent
steps: it corrects a drafter that overstates its own probabilities. HOPE / t_r allows for the error
of an average over only t_r trees. The averages and kappa forget at the rate 1 / RECENT.

Requests whose own trees are not known:

- A request without a tree yet is assumed to break even: alone, it is drafted for; in a batch, it
  does not tip the decision. Its n_r is the average over the first trees of earlier requests.
- A request whose first tree has not been verified yet counts as an average first tree.

Plain steps teach nothing about trees, so trees that do not pay are tried again after

    WAIT min(2^d s^2, 2^DOUBLINGS)

times the duration of a step with trees. d counts the trials since trees last paid, or since the
batch changed in size by a factor of two. s > 1 is the factor by which trees fall short: large
batches can fall short by several times the cost of a draft, and their trials are the most
expensive. Trials thus take at most about 1 / (1 + WAIT 2^d) of the time, whatever a draft costs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from vllm_bastion.policy.cost.table import CostArray

# After one tree a request may turn out 20 % better than that tree promised.
_HOPE = 0.2
# Trees (of a request) or steps (for kappa) that an average covers: long enough to smooth single
# trees, short enough to follow a change of topic within an answer.
_RECENT = 16
# The first trial comes after 16 steps' time: it takes at most 1 / 17, or 6 %, of the time.
_WAIT = 16
# The longest wait is 16 times the first one: trials then take less than 0.4 % of the time.
_DOUBLINGS = 4


@dataclass
class _TreeAverages:
    """Averages over the trees of one request, or over the first trees of all requests."""

    tokens: float = 0.0
    nodes: float = 0.0
    trees: int = 0

    def add(self, tokens: float, nodes: float) -> None:
        self.trees = min(self.trees + 1, _RECENT)
        self.tokens += (tokens - self.tokens) / self.trees
        self.nodes += (nodes - self.nodes) / self.trees


class DraftGate:
    """Decides before each draft whether to make it.

    A request is identified by any integer that is its own while it runs, such as its request slot.
    """

    def __init__(self) -> None:
        self._requests: dict[int, _TreeAverages] = {}
        self._first_trees = _TreeAverages()
        # Decayed sums of accepted and promised draft tokens. Both start at 1, as a prior.
        self._accepted_sum = self._promised_sum = 1.0
        # Requests of the last two decisions to draft. A tree may be made a step after the decision,
        # because the scheduler plans it first, and its promise may reach the host a step after it
        # was verified, because the host does not wait.
        self._awaited: deque[set[int]] = deque([set(), set()], 2)
        self._steps_waited = self._doublings = 0
        # Size of the batch that `_doublings` was counted for.
        self._doublings_batch = 0

    @property
    def kappa(self) -> float:
        """Accepted over promised draft tokens."""
        return self._accepted_sum / self._promised_sum

    def forget(self, request: int) -> None:
        """From now on the integer `request` identifies another request."""
        self._requests.pop(request, None)
        for awaited in self._awaited:
            awaited.discard(request)

    def exclude(self, request: int) -> None:
        """`request` never has a tree: it is a root in every step, and gains nothing."""
        self._requests[request] = _TreeAverages(trees=_RECENT)

    def observe_trees(self, requests: Sequence[int], tokens: ArrayLike, nodes: ArrayLike) -> None:
        """Add trees that were verified, or are about to be, to their requests' averages.

        Args:
            requests: [R] requests.
            tokens: [R] draft tokens expected to be accepted, the sums of the path scores.
            nodes: [R] nodes verified.
        """
        for request, expected, size in zip(
            requests, np.asarray(tokens).tolist(), np.asarray(nodes).tolist(), strict=True
        ):
            if request not in self._requests:
                self._requests[request] = _TreeAverages()
                self._first_trees.add(expected, size)
            self._requests[request].add(expected, size)

    def observe_step(self, promised: float, accepted: float) -> None:
        """Update kappa by a verified step: the draft tokens promised and accepted in all of it."""
        decay = 1.0 - 1.0 / _RECENT
        self._accepted_sum = decay * self._accepted_sum + accepted
        self._promised_sum = decay * self._promised_sum + promised

    def draft(self, requests: Sequence[int], cost_ms: CostArray, plain_ms: float) -> bool:
        """Whether the next step of these requests gets trees.

        Args:
            requests: [R] requests, R >= 1.
            cost_ms: [rows + 1] cost of a step with a draft by its target rows, for this batch.
            plain_ms: cost of a plain step of this batch.
        """
        drafts = self._decide(requests, cost_ms, plain_ms)
        self._awaited.append(set(requests) if drafts else set())
        return drafts

    def _decide(self, requests: Sequence[int], cost_ms: CostArray, plain_ms: float) -> bool:
        count, first = len(requests), self._first_trees
        known = [self._requests[request] for request in requests if request in self._requests]
        num_awaited = 0
        if first.trees:
            awaited = set.union(*self._awaited).difference(self._requests)
            num_awaited = len(awaited.intersection(requests))
        untried = count - len(known) - num_awaited
        nodes = sum(request.nodes for request in known) + (untried + num_awaited) * first.nodes
        # Duration of a step with trees in plain steps.
        cost = float(cost_ms[min(round(count + nodes), len(cost_ms) - 1)]) / plain_ms
        tokens = sum(request.tokens for request in known) + num_awaited * first.tokens
        hope = sum(_HOPE * request.tokens / request.trees for request in known)
        # An untried request is assumed to break even: it emits `cost` tokens.
        average = count - untried + self.kappa * tokens
        if average > count * cost:
            self._doublings = 0
        expected = average + self.kappa * hope + untried * cost
        if expected >= count * cost:
            self._steps_waited = 0
            return True
        return self._is_time_for_trial(known, count, cost, count * cost / expected)

    def _is_time_for_trial(
        self, known: list[_TreeAverages], count: int, cost: float, shortfall: float
    ) -> bool:
        """Count a plain step, or end the wait.

        Args:
            known: averages of the batch's requests that have trees.
            count: requests of the batch.
            cost: duration of a step with trees in plain steps.
            shortfall: tokens needed to pay for the trees over tokens expected.
        """
        if not 0.5 < count / max(self._doublings_batch, 1) < 2.0:
            # The trials so far were made with a batch of another size.
            self._doublings_batch, self._doublings = count, 0
        self._steps_waited += 1
        wait = _WAIT * min(2**self._doublings * shortfall**2, 2**_DOUBLINGS)
        if self._steps_waited < wait * cost:
            return False
        self._steps_waited = 0
        self._doublings = min(self._doublings + 1, _DOUBLINGS)
        for request in known:
            # The trial counts as much as all trees before it.
            request.trees = 1
        return True
