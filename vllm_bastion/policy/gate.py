# SPDX-License-Identifier: Apache-2.0
"""Whether to draft at all: decides before each step between trees and plain decoding.

The budget N* is chosen once a tree exists; the gate decides whether the next step gets trees. With
g_r, the draft tokens that a tree of request r is expected to have accepted, trees emit

    x = ln( sum_r (1 + g_r) / R ) - ln( C(R + sum_r n_r) / P )

more tokens per time than plain steps (a logarithm): C(n) is the cost of a step with trees and n
target rows, P that of a plain step. If x >= 0, the next step gets trees.

g_r = kappa_r a_r. a_r and n_r average the promises (sums of path scores) and the nodes of the
request's own trees. kappa_r is the ratio of its accepted to its promised tokens, with the ratio of
all requests as a prior worth PRIOR_TOKENS. A request is judged by its own trees alone: only its
first RECENT trees count for others, and only until they have trees of their own. Near the end of
its reply a request has no use for a whole tree: see `tokens_until`.

Neither kind of step tells what the other one costs or brings, so the gate explores. Three things
are uncertain in x:

    the requests      Accepted lengths are about geometric, so after t_r trees 1 + g_r has a
                      variance of about (1 + g_r)^2 / (t_r + 1).
    new requests      Those without trees are judged by the trees of m others. What they have in
                      common has the variance BETWEEN / (m + 1) in ln(1 + g), where BETWEEN is the
                      variance between requests. m fades with each new request.
    the cost          ln(C / P) has the variance v that the latency model gives. One step, whose
                      time has the variance r, reduces it by v^2 / (v + r).

A trial of plain steps teaches only the last, a trial of trees all. If s is the standard deviation
of what a trial teaches about x, it is expected to save

    s (phi(z) - z Phi(-z))        z = |x| / s; phi, Phi of the normal distribution

of the time that follows: what is lost where x has the wrong sign. What it teaches of requests is of
use until they end, or for HORIZON steps; the rest is for LONG_HORIZON. The less promising kind is
tried if that saves more than the trial is expected to lose,

    2 C (1 - e^x)     or, for plain steps,     4 P (1 - e^-x)

milliseconds: so many decisions in a row are a trial. Of two, one step is whole: the other begins
or ends with the other kind. Of four, two are whole plain steps and follow a plain one, see
`FilteredLatency.observe`. No trial of trees begins where replies end within it.

Trials are paid from an allowance that grows by SHARE of the time, and by P / R for each new
request. So what is lost to trials is bounded. What a start with hard requests costs later ones is
shown by a study in benchmarks/replay.

The very first trees are grown whatever they promise, for nothing is known of the drafter, unless
they cannot pay: g_r is at most D, the depth of trees, and C / P is known up to that deviation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_bastion.policy.cost.online import StepEstimate
from vllm_bastion.policy.cost.step_filter import NOISE
from vllm_bastion.policy.remaining import NO_LIMIT

# Trees that an average covers: long enough to smooth single trees, short enough to follow a change
# of topic within an answer. What is known of a request that gets no trees fades as fast in steps.
_RECENT = 16
_FADING = 32
# Trees that what is known of all requests covers.
_RECENT_OF_ALL = 256
_PRIOR_TOKENS = 4.0
# Standard deviations by which the cost of the very first trees may be wrong.
_DOUBT = 3.0
_TRIAL_OF_TREES, _TRIAL_OF_PLAIN = 2, 4
# Steps for which the result of a trial is used. By `step_filter._DRIFT` a cost is known to 5% after
# the second number.
_HORIZON, _LONG_HORIZON = 16, 256
# Variance of ln(1 + g) between requests: 0.11 to 0.24 on the recorded ones (tiny pair, T=0 and T=1,
# trees of 8 and 16 nodes).
_BETWEEN = 0.2
# New requests after which what is known of the ones before is forgotten.
_ARRIVALS = 64
_SHARE = 1 / 64
# The allowance starts with this many plain steps, and never holds more than as many tree steps.
_START = 4.0
# A trial is assumed to cost at least this fraction of its time. Changing the kind of step takes
# time too: one step that only verifies and one that only drafts take longer than one with both and
# one with neither.
_MIN_LOSS = 0.3
# Decisions after a trial before the next: what it showed has not arrived yet.
_PAUSE = 3


@dataclass
class _Gain:
    """What the trees of one request, or the first trees of all requests, have brought."""

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


class DraftGate:
    """Decides before each draft whether to make it.

    A request is identified by any integer that is its own while it runs, such as its request slot.

    Args:
        depth: the most draft tokens that a tree can have accepted, D.
    """

    def __init__(self, depth: int) -> None:
        self._most_tokens = 1.0 + depth
        self._requests: dict[int, _Gain] = {}
        self._all = _Gain(_RECENT_OF_ALL)
        self._num_known = 0.0  # requests whose trees are known, m
        self._excluded: set[int] = set()
        self._allowance_ms = -1.0  # negative before the first decision
        self._arrivals = 0
        # Decisions that the current trial still takes, those until the next one may begin, and
        # whether the trial is of trees.
        self._trial = self._pause = 0
        self._trial_of_trees = False
        # Why the last decision was made: a word for logs and metrics.
        self.reason = "start"

    @property
    def exploring(self) -> bool:
        """Whether a trial is under way, or what it showed has not been used yet."""
        return self._trial > 0 or self._pause > 0

    @property
    def kappa(self) -> float:
        """Accepted over promised draft tokens, over the first trees of all requests."""
        return (self._all.accepted + _PRIOR_TOKENS) / (self._all.promised + _PRIOR_TOKENS)

    def forget(self, request: int) -> None:
        """From now on the integer `request` identifies another request."""
        self._requests.pop(request, None)
        self._excluded.discard(request)
        self._num_known *= 1.0 - 1.0 / _ARRIVALS
        self._arrivals += 1

    def exclude(self, request: int) -> None:
        """`request` never has a tree: it is a root in every step, and gains nothing."""
        self._excluded.add(request)

    def observe_trees(
        self, requests: Sequence[int], tokens: Sequence[float], nodes: Sequence[float]
    ) -> None:
        """Add trees that were verified, or are about to be, to their requests' averages.

        Args:
            requests: [R] requests.
            tokens: [R] draft tokens expected to be accepted, the sums of the path scores.
            nodes: [R] nodes verified.
        """
        for request, expected, size in zip(requests, tokens, nodes, strict=True):
            own = self._requests.setdefault(request, _Gain())
            own.add_tree(expected, size)
            self._num_known += own.count == 1
            if own.count <= _RECENT:
                self._all.add_tree(expected, size)

    def observe_outcomes(
        self, requests: Sequence[int], promised: Sequence[float], accepted: Sequence[float]
    ) -> None:
        """Compare verified trees with what they promised.

        Args:
            requests: [R] requests, whose trees `observe_trees` was called with.
            promised: [R] draft tokens that were expected to be accepted.
            accepted: [R] draft tokens that were.
        """
        for request, expected, count in zip(requests, promised, accepted, strict=True):
            own = self._requests.get(request)
            if own is not None:
                own.add_outcome(expected, count)
                if own.count <= _RECENT:
                    self._all.add_outcome(expected, count)

    def draft(
        self, requests: Sequence[int], costs: StepEstimate, remaining: Sequence[int] | None = None
    ) -> bool:
        """Whether the next step of these requests gets trees.

        Args:
            requests: [R] requests, R >= 1.
            costs: of the next step of this batch.
            remaining: [R] most tokens that each request may emit from the next step on, >= 1; None
                without limits.
        """
        count, plain_ms = len(requests), costs.plain_ms
        if remaining is None:
            remaining = [NO_LIMIT] * count
        tokens, variance, common, nodes, unknown = self._expected(requests, remaining)
        tree_ms = costs.tree_step_ms(round(count + nodes))
        # As long as nothing is known of any tree, a request is assumed to break even if it can.
        doubt = math.exp(_DOUBT * costs.ratio_sd)
        for limit in unknown:
            tokens += min(tree_ms / plain_ms, min(self._most_tokens, limit) * doubt)
        advantage = math.log(tokens / count) - math.log(tree_ms / plain_ms)
        drafts = advantage >= -1e-9
        self.reason = "pays" if drafts else "does not pay"
        variances = variance / tokens**2, common / tokens**2
        if not unknown and self._tries_the_other(
            drafts, advantage, variances, costs, tree_ms, count, max(remaining)
        ):
            drafts = not drafts
            self.reason = "trial of trees" if drafts else "trial of plain steps"
        if not drafts:
            for request in requests:
                if request in self._requests:
                    self._requests[request].fade()
        return drafts

    def _expected(
        self, requests: Sequence[int], remaining: Sequence[int]
    ) -> tuple[float, float, float, float, list[int]]:
        """What is expected of a step with trees.

        Returns:
            Its tokens; their variance that each request has for itself, and that which new requests
            have in common; its nodes; and the `remaining` tokens of the requests of which nothing
            is known.
        """
        every, kappa = self._all, self.kappa
        tokens = variance = nodes = of_new = 0.0
        unknown = []
        for request, limit in zip(requests, remaining, strict=True):
            if request in self._excluded or limit <= 1:
                tokens += 1.0
                continue
            own = self._requests.get(request)
            if own is None and not every.trees:
                unknown.append(limit)
                continue
            known = every if own is None else own
            ratio, trees = kappa, 0.0
            if own is not None:
                ratio = (own.accepted + kappa * _PRIOR_TOKENS) / (own.promised + _PRIOR_TOKENS)
                trees = own.trees
            gain = tokens_until(limit - 1, ratio * known.tokens)
            tokens += 1.0 + gain
            nodes += known.nodes
            variance += (1.0 + gain) ** 2 / (trees + 1.0)
            of_new += 0.0 if own else 1.0 + gain
        common = _BETWEEN * of_new**2 / (self._num_known + 1.0)
        return tokens, variance, common, nodes, unknown

    def _tries_the_other(
        self,
        drafts: bool,
        advantage: float,
        gain_variances: tuple[float, float],
        costs: StepEstimate,
        tree_ms: float,
        count: int,
        longest: int,
    ) -> bool:
        """Whether to take the less promising kind of step, paid from the allowance.

        gain_variances: of ln(tokens), see `_expected`.
        longest: steps until all requests have ended, at most.
        """
        plain_ms = costs.plain_ms
        if self._allowance_ms < 0.0:
            self._allowance_ms = _START * plain_ms
        earned = _SHARE * (tree_ms if drafts else plain_ms) + self._arrivals * plain_ms / count
        self._allowance_ms = min(self._allowance_ms + earned, _START * tree_ms)
        self._arrivals = 0
        if self._trial:
            self._trial -= 1
            return self._trial_of_trees != drafts
        if self._pause:
            self._pause -= 1
            return False
        other_ms, now_ms = (plain_ms, tree_ms) if drafts else (tree_ms, plain_ms)
        steps = _TRIAL_OF_PLAIN if drafts else _TRIAL_OF_TREES
        if not drafts and longest <= steps:
            return False
        of_requests, common = (0.0, 0.0) if drafts else gain_variances
        lasting = costs.ratio_sd**4 / (costs.ratio_sd**2 + NOISE**2) + common
        soon = _normal_loss(advantage, math.sqrt(lasting + of_requests))
        later = _normal_loss(advantage, math.sqrt(lasting))
        near = min(_HORIZON, longest)
        saved = now_ms * (near * soon + (_LONG_HORIZON - near) * later)
        loss = steps * other_ms * max(1.0 - math.exp(-abs(advantage)), _MIN_LOSS)
        if loss > min(saved, self._allowance_ms):
            return False
        self._allowance_ms -= loss
        self._trial, self._pause, self._trial_of_trees = steps - 1, _PAUSE, not drafts
        return True


def tokens_until(end: int, tokens: float) -> float:
    """Mean of min(n, `end`) for a geometric n >= 0 with the mean `tokens`.

    So many draft tokens are accepted of a request that can only use `end` more of them.
    """
    return tokens * (1.0 - (tokens / (1.0 + tokens)) ** end)


def _normal_loss(mean: float, sd: float) -> float:
    """Expected amount by which a normal variable lies beyond 0, on the side away from its mean."""
    if sd == 0.0:
        return 0.0
    z = abs(mean) / sd
    density = math.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi)
    return sd * (density - 0.5 * z * math.erfc(z / math.sqrt(2.0)))
