# SPDX-License-Identifier: Apache-2.0
"""Whether to draft at all: trees or plain decoding, step by step, from what each request gained.

The budget N* is decided when a tree is there; this file decides whether the coming step gets one.
With a_r the draft tokens that request r is expected to have accepted of a tree and n_r its nodes,
both averages over its own trees, a batch of R requests drafts while

    (R + kappa sum a_r) / C(R + sum n_r)  >  R / C_plain          tokens per millisecond

kappa is the realised over the promised number of accepted tokens, so that a drafter that overstates
itself is found out. Requests differ more than the steps of one request do: a request that has no
tree yet counts as one that just pays, so that alone it gets its tree and among many it changes
nothing, and its average starts at what requests have been worth so far.

While no tree is drafted nothing is learned about trees, so now and then one is drafted all the
same. The first wait is `_WAIT` times as long as a step with a tree takes, and it doubles `_DOUBLE`
times while trees do not pay: that bounds what trying costs, whatever a draft costs here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from vllm_bastion.cost.table import CostArray

# An untried request is worth this much more than break-even, and one that has had n trees this
# n-th part more than their average: what is not known yet is worth a try.
_OPTIMISM = 1.05
_HOPE = 0.2
# Weight of what other requests were worth, in trees, and of the past of the request itself.
_PRIOR_TREES = 1.0
_MAX_TREES = 16.0
_POPULATION_RATE = 0.1
_KAPPA_DECAY = 0.975
_MAX_KAPPA = 4.0
_WAIT = 16
_DOUBLE = 4


@dataclass
class _Worth:
    """Averages over the trees of one request, or of requests."""

    tokens: float
    nodes: float
    trees: float = 0.0

    def add(self, tokens: float, nodes: float) -> None:
        self.trees = min(self.trees + 1.0, _MAX_TREES)
        self.move(tokens, nodes, 1.0 / self.trees)

    def move(self, tokens: float, nodes: float, rate: float) -> None:
        self.tokens += rate * (tokens - self.tokens)
        self.nodes += rate * (nodes - self.nodes)


class DraftGate:
    """Decides before each draft whether it is made. Requests are named by any integer."""

    def __init__(self) -> None:
        self._requests: dict[int, _Worth] = {}
        self._population: _Worth | None = None
        # decayed sums of accepted draft tokens, realised and promised; one token of prior each
        self._realised = self._promised = 1.0
        self._waited = 0
        self._doublings = 0
        self._batch = 0

    @property
    def kappa(self) -> float:
        """Realised over promised accepted draft tokens, at most 4."""
        return min(self._realised / self._promised, _MAX_KAPPA)

    def forget(self, request: int) -> None:
        """The name belongs to another request from here on."""
        self._requests.pop(request, None)

    def promised(self, requests: Sequence[int], tokens: ArrayLike, nodes: ArrayLike) -> None:
        """Trees are about to be verified.

        Args:
            requests: [R] names.
            tokens: [R] draft tokens expected to be accepted, the sums of their path scores.
            nodes: [R] nodes verified.
        """
        for name, gain, size in zip(
            requests, np.asarray(tokens).tolist(), np.asarray(nodes).tolist(), strict=True
        ):
            worth = self._requests.get(name)
            if worth is None:
                if self._population is None:
                    self._population = _Worth(gain, size)
                self._population.move(gain, size, _POPULATION_RATE)
                prior = self._population
                worth = self._requests[name] = _Worth(prior.tokens, prior.nodes, _PRIOR_TREES)
            worth.add(gain, size)

    def realised(self, promised: float, accepted: float) -> None:
        """Take in a verified step: draft tokens promised and accepted, over all its requests."""
        self._realised = _KAPPA_DECAY * self._realised + accepted
        self._promised = _KAPPA_DECAY * self._promised + promised

    def draft(self, requests: Sequence[int], cost_ms: CostArray, plain_ms: float) -> bool:
        """Whether the coming step of these requests gets trees.

        Args:
            requests: [R] names, R >= 1.
            cost_ms: [rows + 1] cost of a step with a draft by its target rows, at this batch.
            plain_ms: cost of a step of theirs without one.
        """
        known = [self._requests[name] for name in requests if name in self._requests]
        count, untried = len(requests), len(requests) - len(known)
        nodes = sum(worth.nodes for worth in known)
        if self._population is not None:
            nodes += untried * self._population.nodes
        relative_cost = float(cost_ms[min(round(count + nodes), len(cost_ms) - 1)]) / plain_ms
        average = len(known) + self.kappa * sum(worth.tokens for worth in known)
        hope = self.kappa * sum(_HOPE * worth.tokens / worth.trees for worth in known)
        hope += untried * _OPTIMISM * relative_cost
        if average > count * relative_cost:
            self._doublings = 0
        if average + hope > count * relative_cost:
            self._waited = 0
            return True
        if not 0.5 < count / max(self._batch, 1) < 2.0:
            # What was learned was learned about another batch.
            self._batch, self._doublings = count, 0
        self._waited += 1
        if self._waited < _WAIT * 2**self._doublings * relative_cost:
            return False
        self._waited = 0
        self._doublings = min(self._doublings + 1, _DOUBLE)
        for worth in known:
            # The trial is to count as much as all that was seen before.
            worth.trees = min(worth.trees, 1.0)
        return True
