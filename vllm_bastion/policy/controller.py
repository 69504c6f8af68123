# SPDX-License-Identifier: Apache-2.0
"""The controller: decides after each step whether the next one drafts, and prices its rows.

With R requests, g_r the draft tokens that a tree of request r is expected to have accepted
(`Gains`), n_r its nodes, and the costs P of a plain step and C(n) of a step with trees and n target
rows (`LatencyModel`), trees emit

    x = ln( sum_r (1 + g_r) / R ) - ln( C(R + sum_r n_r) / P )

more tokens per time than plain steps (a logarithm). The next step drafts if x >= 0. Once the trees
exist, their own scores kappa_r rho choose how many nodes are verified, by the same costs:
`bastion_kernels.choose_budget` on the device, which reads both from buffers that `plan` writes, and
`StepSize` on the host where a step is sized before its scores are known.

Neither kind of step shows what the other one brings: `Probes` tries it now and then. The very first
trees are grown whatever they promise, unless even trees that are accepted as a whole could not pay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from vllm_bastion.policy.cost.latency import LatencyModel, StepEstimate
from vllm_bastion.policy.cost.table import CostArray, context_bucket
from vllm_bastion.policy.gains import Gains
from vllm_bastion.policy.probes import Probes
from vllm_bastion.policy.remaining import RemainingTokens
from vllm_bastion.policy.step_size import StepSize
from vllm_bastion.step_times import StepTimes

# Factor by which calibrated costs may be wrong of the very first trees, and once trees are timed.
_FIRST_DOUBT, _DOUBT = 2.5, 1.5
# Trees after which it is known what trees bring.
_KNOWN_TREES = 16
# kappa is installed again when its logarithm has changed by this much: it is copied to the device.
_KAPPA_STEP = 0.05


class CostBuffers(Protocol):
    """Where the device reads what the controller writes, see `Trees`."""

    def set_cost_ms(self, cost_ms: CostArray) -> None:
        """Install C."""

    def set_log_kappa(self, log_kappa: np.ndarray) -> None:
        """Install ln kappa_r, [S] fp32 by request slot."""


@dataclass(frozen=True)
class Batch:
    """What is known of the next step when the current one has been computed."""

    # [R] request slots that go on, and the most tokens that each may emit from the next step on.
    slots: Sequence[int]
    remaining: Sequence[int]
    # Requests of the current step, and their mean cached tokens.
    num_reqs: int
    context_len: float
    # Positions of its block that the drafter does not predict.
    spared: int = 0
    # Whether prompts can fill the step, and whether any request may have nodes.
    backlog: bool = False
    wants_nodes: bool = True


@dataclass(frozen=True)
class Decision:
    """Whether the next step has trees, and why: a label of metrics."""

    drafts: bool
    reason: str
    # Cost of a plain step; infinite if it does not matter.
    plain_ms: float = math.inf
    # Whether no request of the batch has a use for a draft: each may emit one token at most.
    replies_end: bool = False


class Controller:
    """Decides for one engine: `observe` what steps showed, `plan` the next one.

    Knows no device and no vLLM.

    Args:
        depth: D, the most draft tokens that a tree can have accepted.
        num_slots: S.
        latency: costs of steps.
        buffers: what the device reads; None if nothing does.
    """

    def __init__(
        self,
        depth: int,
        num_slots: int,
        latency: LatencyModel,
        buffers: CostBuffers | None = None,
    ) -> None:
        self.latency = latency
        self.gains, self.remaining = Gains(), RemainingTokens(num_slots)
        self.size = StepSize()
        self._depth, self._buffers = depth, buffers
        self._probes = Probes()
        self._log_kappa = np.zeros(num_slots, dtype=np.float32)
        self._installed: CostArray | None = None
        # What `costs` is of, and whether nothing was learned since.
        self._priced, self._is_current = (1, -1, 0), False
        # Told of each whole step that was timed: whether it verified drafts, its rows, and its
        # predicted and measured milliseconds.
        self.on_step: Callable[[bool, int, float, float], None] | None = None
        self.costs = self.price(1, 1.0)

    # ---- requests ------------------------------------------------------------------------

    def restart(self, slot: int, tokens: int) -> None:
        """A new request takes the slot, and may emit so many tokens."""
        self.gains.forget(slot)
        self.remaining.restart(slot, tokens)

    def kappa_in_use(self, slots: np.ndarray) -> np.ndarray:
        """[R] kappa_r of the scores of the latest trees."""
        kappa: np.ndarray = np.exp(self._log_kappa[slots])
        return kappa

    # ---- what steps showed ---------------------------------------------------------------

    def observe(self, steps: Sequence[StepTimes]) -> None:
        """Learn from the times of completed steps, oldest first.

        Consecutive plain steps of as many requests collapse into the last.
        """
        passed = 0
        for i, step in enumerate(steps, 1):
            passed += 1
            if i < len(steps) and _same_plain(step, steps[i]):
                continue
            if self.on_step is not None:
                self._report(step, self.on_step)
            self.latency.observe(step, passed)
            self._is_current, passed = False, 0

    @property
    def is_probing(self) -> bool:
        """Whether the times of the last steps may decide at once."""
        return self._probes.active

    def _report(self, step: StepTimes, on_step: Callable[[bool, int, float, float], None]) -> None:
        # A step that only verifies or only drafts is of neither kind.
        if step.total_ms is None or step.verified != step.drafted:
            return
        costs = self.latency.estimate(step.num_reqs, step.context_len, step.spared)
        predicted = costs.tree_step_ms(step.rows) if step.verified else costs.plain_ms
        on_step(step.verified, step.rows, predicted, step.total_ms)

    def correction(self) -> dict[str, float]:
        """The factors of the batch that was priced last, see `LatencyModel.correction`."""
        return self.latency.correction(self._priced[0])

    # ---- the next step -------------------------------------------------------------------

    def price(self, num_reqs: int, context_len: float, spared: int = 0) -> StepEstimate:
        """Estimate the costs of a batch, and install them for the device if they changed."""
        batch = num_reqs, context_bucket(context_len), spared
        if not self._is_current or batch != self._priced:
            self._priced, self._is_current = batch, True
            self.costs = self.latency.estimate(num_reqs, context_len, spared)
            # N* does not depend on a common factor of all costs.
            if self.costs.curve is not self._installed:
                self._installed = self.costs.curve
                if self._buffers is not None:
                    self._buffers.set_cost_ms(self._installed)
        return self.costs

    def plan(self, batch: Batch) -> Decision:
        """Decide about the step after the current one."""
        costs = self.price(batch.num_reqs, batch.context_len, batch.spared)
        if not batch.slots or max(batch.remaining) <= 1:
            decision = Decision(False, "replies end", replies_end=True)
        elif batch.backlog:
            decision = Decision(False, "prompts wait")
        elif not batch.wants_nodes:
            decision = Decision(False, "requests want none")
        else:
            decision = self._weigh(batch, costs)
        if decision.drafts:
            self._install_kappa(batch.slots)
        else:
            self.gains.fade(batch.slots)
        return decision

    def _weigh(self, batch: Batch, costs: StepEstimate) -> Decision:
        count, plain_ms = len(batch.slots), costs.plain_ms
        expected = self.gains.expected(batch.slots, batch.remaining)
        tree_ms = costs.tree_step_ms(round(count + expected.nodes))
        ratio, tokens = tree_ms / plain_ms, expected.tokens
        # Without data, draft unless even full acceptance could not pay.
        for limit in expected.unknown:
            tokens += min(ratio, min(1.0 + self._depth, limit) * _FIRST_DOUBT)
        gain = tokens / count / ratio
        decision = Decision(gain >= 1.0 - 1e-9, "pays", plain_ms)
        if not decision.drafts:
            decision = replace(decision, reason="does not pay")
        if not expected.unknown and self._probes.reverses(
            decision.drafts,
            ratio,
            gain,
            new=sum(map(self.gains.is_new, batch.slots)) / count,
            in_doubt=gain < _DOUBT
            and self.gains.num_trees >= _KNOWN_TREES
            and not self.latency.plain_is_known(count),
            ends_in=max(batch.remaining),
        ):
            kind = "plain steps" if decision.drafts else "trees"
            decision = Decision(not decision.drafts, f"trial of {kind}", plain_ms)
        return decision

    def _install_kappa(self, slots: Sequence[int]) -> None:
        if self._buffers is None or not slots:
            return
        new = [math.log(self.gains.kappa_of(slot)) for slot in slots]
        if np.abs(self._log_kappa[slots] - new).max() > _KAPPA_STEP:
            self._log_kappa[slots] = new
            self._buffers.set_log_kappa(self._log_kappa)


def _same_plain(step: StepTimes, following: StepTimes) -> bool:
    """Whether both are plain steps of as many requests: the later one tells the same."""
    drafts = step.verified or step.drafted or following.verified or following.drafted
    return not drafts and step.num_reqs == following.num_reqs
