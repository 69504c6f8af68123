# SPDX-License-Identifier: Apache-2.0
"""Whether to draft at all: tree, chain or plain decoding, per batch and slowly.

The budget N* is decided when a tree is there; this file decides whether the *next* step gets one.
With E the expected tokens of a step, R its requests and C its cost, a mode yields

    rate = (R + kappa (E - R)) / C   tokens per millisecond;   plain decoding R / C_plain

kappa is the realised over the expected accepted draft tokens, so that a drafter that overstates
itself is found out. Rates are compared as logarithms relative to plain decoding, averaged over
steps.

Another mode is taken up only when it is better by `_MARGIN`. While no tree is drafted nothing is
learned about trees, so a few tree steps are tried now and then, at intervals that double up to
`_LAST_INTERVAL`: that bounds what staying away from trees can cost, and what trying them does.
"""

from __future__ import annotations

import math
from typing import Literal

from vllm_bastion.controller import Budget

Mode = Literal["tree", "chain", "plain"]

_MARGIN = math.log(1.03)
_EMA = 0.1
# Steps before a mode may be left: the average must stand on something.
_DWELL = 10
_PROBE_STEPS = 4
_FIRST_INTERVAL = 16
_LAST_INTERVAL = 256


class ModeSelector:
    """The mode of the next step.

    Args:
        chain: whether the chain is a candidate of its own, i.e. cheaper than a tree of its size.
    """

    def __init__(self, *, chain: bool = False) -> None:
        self.mode: Mode = "tree"
        self._chain = chain
        # log rate relative to plain decoding
        self._gain: dict[Mode, float] = {"plain": 0.0}
        self._steps = 0
        self._interval = _FIRST_INTERVAL
        self._countdown = 0
        self._probe: list[float] = []
        self._probing = False
        self._num_reqs = 0
        # decayed sums of accepted draft tokens, realised and expected; one token of prior each
        self._realised = self._expected = 1.0

    @property
    def kappa(self) -> float:
        """Realised over expected accepted draft tokens, at most 4."""
        return min(self._realised / self._expected, 4.0)

    def observe(self, budget: Budget, num_reqs: int, tokens: int) -> None:
        """Take in what a verified step gave: `tokens` emitted by its `num_reqs` requests."""
        decay = 1.0 - _EMA / 4
        self._realised = decay * self._realised + (tokens - num_reqs)
        self._expected = decay * self._expected + (budget.expected_tokens - num_reqs)

    def next_mode(
        self,
        num_reqs: int,
        plain_ms: float,
        tree: Budget | None = None,
        chain: Budget | None = None,
    ) -> Mode:
        """Decide what the coming draft is.

        Args:
            num_reqs: requests that decode.
            plain_ms: cost of a step of theirs without drafting.
            tree: this step's decision for a tree, where one was drafted.
            chain: what the chain would have been, where that is known.
        """
        plain = math.log(num_reqs / plain_ms)
        offers: dict[Mode, Budget | None] = {"tree": tree, "chain": chain if self._chain else None}
        gains = {
            mode: math.log(self._tokens(budget, num_reqs) / budget.cost_ms) - plain
            for mode, budget in offers.items()
            if budget is not None
        }
        resized = self._num_reqs and not 0.5 < num_reqs / self._num_reqs < 2.0
        if resized or not self._num_reqs:
            self._num_reqs = num_reqs
        if resized and self.mode != "tree":
            self._interval, self._countdown = _FIRST_INTERVAL, min(self._countdown, 1)
        for mode, gain in gains.items():
            if mode == "tree" and self._probing:
                self._probe.append(gain)
            else:
                old = self._gain.get(mode, gain)
                self._gain[mode] = old + _EMA * (gain - old)
        self._steps += 1
        if self.mode == "tree":
            self._maybe_leave_tree()
        else:
            self._maybe_return()
        return "tree" if self._probing else self.mode

    def _tokens(self, budget: Budget, num_reqs: int) -> float:
        return num_reqs + self.kappa * (budget.expected_tokens - num_reqs)

    def _maybe_leave_tree(self) -> None:
        if self._steps < _DWELL or "tree" not in self._gain:
            return
        others = {mode: gain for mode, gain in self._gain.items() if mode != "tree"}
        best = max(others, key=lambda mode: others[mode])
        if others[best] > self._gain["tree"] + _MARGIN:
            self._enter(best)

    def _maybe_return(self) -> None:
        if self._probing:
            if len(self._probe) < _PROBE_STEPS:
                return
            gain = sum(self._probe) / len(self._probe)
            self._probing, self._probe = False, []
            self._gain["tree"] = gain
            if gain > self._gain[self.mode] + _MARGIN:
                self._interval = _FIRST_INTERVAL
                self._enter("tree")
            else:
                self._interval = min(2 * self._interval, _LAST_INTERVAL)
                self._countdown = self._interval
            return
        if self.mode == "chain" and self._gain["chain"] < -_MARGIN and self._steps >= _DWELL:
            self._enter("plain")
        self._countdown -= 1
        if self._countdown <= 0:
            self._probing = True

    def _enter(self, mode: Mode) -> None:
        self.mode = mode
        self._steps = 0
        self._countdown = self._interval
