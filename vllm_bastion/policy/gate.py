# SPDX-License-Identifier: Apache-2.0
"""Whether to draft at all: trees or plain decoding, step by step, from what each request gained.

The budget N* is decided when a tree is there; this file decides whether the coming step gets one.
With a_r the draft tokens that request r is expected to have accepted of a tree and n_r its nodes,
both averages over its own trees, t_r in number, a batch of R requests drafts while

    R + kappa sum a_r (1 + HOPE / t_r)   >=   R C(R + sum n_r) / C_plain

C being the cost of a step with a draft. HOPE / t_r is the part by which a request may be better
than its t_r trees say. kappa is the realised over the promised number of accepted tokens, so that a
drafter that overstates itself is found out. Both averages and kappa forget at the rate 1 / RECENT.

Requests differ more than the steps of one request do, so the averages of a request start with its
own first tree. One that has no tree yet counts as one that just pays, so that alone it gets its
tree and among many it changes nothing; n_r is what first trees had so far. One whose first tree is
on its way, unheard of, counts as the average first tree.

While no tree is drafted nothing is learned about trees, so now and then one is drafted all the
same: after WAIT 2^d steps with a tree would have taken their time, where d counts such trials in a
row, up to DOUBLINGS. That bounds what trying costs to a part 1 / (1 + WAIT 2^d), whatever a draft
costs here. Within the longest wait it is waited longer by the square of the factor by which trees
fall short: many requests at once miss by several times what a draft costs, and try most dearly.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from vllm_bastion.policy.cost.table import CostArray

_HOPE = 0.2
# An average, and kappa, forgets what is more than about so many trees, or steps, ago.
_RECENT = 16
_WAIT = 16
_DOUBLINGS = 4


@dataclass
class _Worth:
    """Averages over trees: of one request, or the first ones of all."""

    tokens: float = 0.0
    nodes: float = 0.0
    trees: int = 0

    def add(self, tokens: float, nodes: float) -> None:
        self.trees = min(self.trees + 1, _RECENT)
        self.tokens += (tokens - self.tokens) / self.trees
        self.nodes += (nodes - self.nodes) / self.trees


class DraftGate:
    """Decides before each draft whether it is made. Requests are named by any integer."""

    def __init__(self) -> None:
        self._requests: dict[int, _Worth] = {}
        self._first_trees = _Worth()
        # Decayed sums of accepted draft tokens, realised and promised; one token of prior each.
        self._realised = self._promised = 1.0
        # Requests that a draft was decided for of late, and not heard of yet: it is made a step
        # after the decision where the scheduler must know of it first, and where the host never
        # waits it is heard of a step after it was verified.
        self._on_the_way: deque[set[int]] = deque([set(), set()], 2)
        self._waited = self._doublings = 0
        # Requests of the batch that the doublings are about.
        self._batch = 0

    @property
    def kappa(self) -> float:
        """Realised over promised accepted draft tokens."""
        return self._realised / self._promised

    def forget(self, request: int) -> None:
        """The name belongs to another request from here on."""
        self._requests.pop(request, None)
        for asked in self._on_the_way:
            asked.discard(request)

    def promised(self, requests: Sequence[int], tokens: ArrayLike, nodes: ArrayLike) -> None:
        """Trees are verified, or about to be.

        Args:
            requests: [R] names.
            tokens: [R] draft tokens expected to be accepted, the sums of their path scores.
            nodes: [R] nodes verified.
        """
        for name, gain, size in zip(
            requests, np.asarray(tokens).tolist(), np.asarray(nodes).tolist(), strict=True
        ):
            if name not in self._requests:
                self._requests[name] = _Worth()
                self._first_trees.add(gain, size)
            self._requests[name].add(gain, size)

    def realised(self, promised: float, accepted: float) -> None:
        """Take in a verified step: draft tokens promised and accepted, over all its requests."""
        keep = 1.0 - 1.0 / _RECENT
        self._realised = keep * self._realised + accepted
        self._promised = keep * self._promised + promised

    def draft(self, requests: Sequence[int], cost_ms: CostArray, plain_ms: float) -> bool:
        """Whether the coming step of these requests gets trees.

        Args:
            requests: [R] names, R >= 1.
            cost_ms: [rows + 1] cost of a step with a draft by its target rows, at this batch.
            plain_ms: cost of a step of theirs without one.
        """
        drafts = self._pays(requests, cost_ms, plain_ms)
        self._on_the_way.append(set(requests) if drafts else set())
        return drafts

    def _pays(self, requests: Sequence[int], cost_ms: CostArray, plain_ms: float) -> bool:
        count, first = len(requests), self._first_trees
        known = [self._requests[name] for name in requests if name in self._requests]
        on_the_way = 0
        if first.trees:
            asked = set.union(*self._on_the_way).difference(self._requests)
            on_the_way = len(asked.intersection(requests))
        untried = count - len(known) - on_the_way
        nodes = sum(worth.nodes for worth in known) + (untried + on_the_way) * first.nodes
        # In plain steps' time, which is what a request without a draft emits a token in.
        cost = float(cost_ms[min(round(count + nodes), len(cost_ms) - 1)]) / plain_ms
        tokens = sum(worth.tokens for worth in known) + on_the_way * first.tokens
        hope = sum(_HOPE * worth.tokens / worth.trees for worth in known)
        # An untried request just pays: a token and what else the cost asks of each.
        average = count - untried + self.kappa * tokens
        if average > count * cost:
            self._doublings = 0
        expected = average + self.kappa * hope + untried * cost
        if expected >= count * cost:
            self._waited = 0
            return True
        if not 0.5 < count / max(self._batch, 1) < 2.0:
            # What was learned was learned about another batch.
            self._batch, self._doublings = count, 0
        self._waited += 1
        short = count * cost / expected
        wait = _WAIT * min(2**self._doublings * short**2, 2**_DOUBLINGS)
        if self._waited < wait * cost:
            return False
        self._waited = 0
        self._doublings = min(self._doublings + 1, _DOUBLINGS)
        for worth in known:
            # The trial is to count as much as all that was seen before.
            worth.trees = 1
        return True
