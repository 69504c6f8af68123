# SPDX-License-Identifier: Apache-2.0
"""The gain of trees: each request's path scores, calibrated by what was accepted.

The sum of a tree's path scores rho, its "promised" tokens, is the drafter's own estimate of the
accepted ones, and it is biased. With A_r and P_r the accepted and the promised draft tokens of
request r, decayed sums over its latest trees,

    kappa_r = (A_r + 16 kappa) / (P_r + 16)       kappa: the same ratio over all requests

The calibrated score kappa_r rho decides which nodes are verified, how a batch shares them, and
whether to draft at all.

A request's estimate is the mean of its latest trees. A request without trees gets the mean of other
requests' first trees. Trees that hold a copy of the context say nothing of the drafter: they are
left out, and trees of copies alone have a `Gains` of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Trees that a mean covers: long enough to smooth single trees, short enough to follow a change of
# topic within an answer.
_RECENT = 16
# The same for the first trees of all requests.
_RECENT_OF_ALL = 256
# Steps without trees in which the weight of a request's own trees falls to 1/e.
_FADING = 32
# Weight of the ratio of all requests, in promised tokens.
_PRIOR_TOKENS = 16.0
# Weight of other requests' trees, in trees.
_PRIOR_TREES = 1.0


@dataclass(slots=True)
class _Gain:
    """Trees of one request, or the first trees of all requests."""

    memory: int = _RECENT
    # Trees ever added.
    count: int = 0
    # Number of trees that the two means stand for; it fades.
    trees: float = 0.0
    tokens: float = 0.0
    nodes: float = 0.0
    # Decayed sums of draft tokens.
    promised: float = 0.0
    accepted: float = 0.0

    def add_tree(self, tokens: float, nodes: float) -> None:
        self.count += 1
        self.trees = min(self.trees, self.memory - 1) + 1.0
        self.tokens += (tokens - self.tokens) / self.trees
        self.nodes += (nodes - self.nodes) / self.trees

    def add_outcome(self, promised: float, accepted: float) -> None:
        decay = 1.0 - 1.0 / self.memory
        self.promised = decay * self.promised + promised
        self.accepted = decay * self.accepted + accepted

    def fade(self) -> None:
        decay = 1.0 - 1.0 / _FADING
        self.trees *= decay
        self.promised *= decay
        self.accepted *= decay


@dataclass(frozen=True)
class Expected:
    """A step with trees for some requests."""

    # Tokens that it emits, roots included, and nodes that it verifies.
    tokens: float
    nodes: float
    # [U] most tokens of each request without data; not counted in `tokens`.
    unknown: list[int]


class Gains:
    """Means and ratios by request.

    A request is identified by any integer that is its own while it runs, such as its request slot.
    """

    def __init__(self) -> None:
        self._requests: dict[int, _Gain] = {}
        self._all = _Gain(_RECENT_OF_ALL)
        self._excluded: set[int] = set()

    @property
    def kappa(self) -> float:
        """Accepted over promised draft tokens, over the first trees of all requests."""
        return (self._all.accepted + _PRIOR_TOKENS) / (self._all.promised + _PRIOR_TOKENS)

    @property
    def num_trees(self) -> int:
        """Trees, of all requests, from which a new request's gain is estimated."""
        return self._all.count

    def kappa_of(self, request: int) -> float:
        """kappa_r."""
        own, kappa = self._requests.get(request), self.kappa
        if own is None:
            return kappa
        return (own.accepted + kappa * _PRIOR_TOKENS) / (own.promised + _PRIOR_TOKENS)

    def forget(self, request: int) -> None:
        """From now on the integer `request` identifies another request."""
        self._requests.pop(request, None)
        self._excluded.discard(request)

    def exclude(self, request: int) -> None:
        """`request` never gets a tree: it adds one row and one token to every step."""
        self._excluded.add(request)

    def is_new(self, request: int) -> bool:
        """Whether `request` has had no tree, and may get one."""
        return request not in self._requests and request not in self._excluded

    def meet(self, requests: Sequence[int]) -> None:
        """These requests had trees, from which nothing may be learned: they are not new."""
        for request in requests:
            if request not in self._requests:
                self._requests[request] = _Gain()

    def add_trees(
        self, requests: Sequence[int], promised: Sequence[float], nodes: Sequence[float]
    ) -> None:
        """Trees were verified, or are about to be.

        Args:
            requests: [R] requests.
            promised: [R] sums of the path scores rho, without kappa.
            nodes: [R] nodes verified.
        """
        for request, tokens, size in zip(requests, promised, nodes, strict=True):
            own = self._requests.setdefault(request, _Gain())
            own.add_tree(tokens, size)
            if own.count <= _RECENT:
                self._all.add_tree(tokens, size)

    def add_outcomes(
        self, requests: Sequence[int], promised: Sequence[float], accepted: Sequence[float]
    ) -> None:
        """Add the outcomes of verified trees.

        Args:
            requests: [R] requests, whose trees `add_trees` was called with.
            promised: [R] sums of the path scores rho of the verified nodes, without kappa.
            accepted: [R] draft tokens accepted.
        """
        for request, tokens, count in zip(requests, promised, accepted, strict=True):
            own = self._requests.get(request)
            if own is not None:
                own.add_outcome(tokens, count)
                if own.count <= _RECENT:
                    self._all.add_outcome(tokens, count)

    def add_last_outcomes(self, promised: Sequence[float], accepted: Sequence[float]) -> None:
        """Add the outcomes of the last trees of requests that have ended, see `add_outcomes`.

        The step that ends a reply is more likely one with many accepted tokens. Without these steps
        kappa would be too low where replies are short.
        """
        for tokens, count in zip(promised, accepted, strict=True):
            self._all.add_outcome(tokens, count)

    def fade(self, requests: Sequence[int]) -> None:
        """These requests take a step without trees."""
        for request in requests:
            own = self._requests.get(request)
            if own is not None:
                own.fade()

    def expected(self, requests: Sequence[int], remaining: Sequence[int]) -> Expected:
        """A step with trees for `requests`, [R], which may emit `remaining` tokens each, [R]."""
        every, tokens, nodes = self._all, 0.0, 0.0
        unknown = []
        for request, limit in zip(requests, remaining, strict=True):
            if request in self._excluded or limit <= 1:
                tokens += 1.0
                continue
            if not every.trees:
                unknown.append(limit)
                continue
            own = self._requests.get(request)
            known, size = every.tokens, every.nodes
            if own is not None:
                share = own.trees / (own.trees + _PRIOR_TREES)
                known += share * (own.tokens - known)
                size += share * (own.nodes - size)
            tokens += 1.0 + tokens_until(limit - 1, self.kappa_of(request) * known)
            nodes += size
        return Expected(tokens, nodes, unknown)


def tokens_until(end: int, tokens: float) -> float:
    """Mean of min(n, `end`) for a geometric n >= 0 with the mean `tokens`.

    The draft tokens that a request near its end gets: it can use only `end` more.
    """
    return tokens * (1.0 - (tokens / (1.0 + tokens)) ** end)
