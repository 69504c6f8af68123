# SPDX-License-Identifier: Apache-2.0
"""The controller: decides before a step whether it ends with a draft, and prices the next step.

With R requests, g_r the draft tokens that a tree of request r is expected to have accepted
(`Gains`), n_r its nodes, and the costs P of a plain step and C(n) of a step with trees and n target
rows (`LatencyModel`), the speed-up of trees over plain steps, in tokens per time, is e^x with

    x = ln( sum_r (1 + g_r) / R ) - ln( C(R + sum_r n_r) / P )

The next step has trees, so the current one ends with a draft, if x >= 0.

With lookup, a step without a draft ends with trees of copies alone, which cost no drafter pass: a
step with n rows takes Q + C(n) - C(R), with Q what it takes with one row for each request. The
promised tokens e_r of request r's copy are known with or without a draft, and have a kappa_r of
their own. So a draft must beat the copies that could be verified without one: `plan` uses the
promised tokens of the latest copies, and `prefers_copies` those of the current ones, where the host
knows them before it drafts.

Once the trees exist, the number of verified nodes follows from their scores kappa_r rho and the
same costs. `bastion_kernels.choose_budget` chooses it on the device, from buffers that `plan`
writes; `StepSize` on the host, where a step is sized before its scores are known.

Steps of one kind yield no data on the other kind: `Probes` tries it now and then. Without data on
trees, draft unless even full acceptance could not pay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from vllm_bastion.policy.cost.latency import LatencyModel, StepEstimate
from vllm_bastion.policy.cost.table import CostArray, context_bucket
from vllm_bastion.policy.gains import Expected, Gains
from vllm_bastion.policy.probes import Probes
from vllm_bastion.policy.remaining import RemainingTokens
from vllm_bastion.policy.step_size import StepSize
from vllm_bastion.step_times import StepTimes

# Factor by which calibrated costs may be wrong: for the very first trees, and once trees are timed.
_FIRST_DOUBT, _DOUBT = 2.5, 1.5
# Trees after which their mean gain is trusted.
_KNOWN_TREES = 16
# Weight of a new copy's expected tokens in their mean; fewest expected tokens of a copy worth
# verifying; change of Q after which costs are installed again.
_NEW_COPY, _MIN_COPY, _COST_STEP = 0.25, 0.3, 0.05
# kappa is installed again when its logarithm has changed by this much: it is copied to the device.
_KAPPA_STEP = 0.05


class CostBuffers(Protocol):
    """Where the device reads what the controller writes, see `Trees`."""

    def set_cost_ms(self, cost_ms: CostArray) -> None:
        """Install C."""

    def set_copy_cost_ms(self, cost_ms: CostArray) -> None:
        """Install the cost of a step without a draft."""

    def set_log_kappa(self, log_kappa: np.ndarray) -> None:
        """Install ln kappa_r, [2, S] fp32 by request slot: of drafts, and of copies alone."""


@dataclass(frozen=True)
class Batch:
    """The next step, as far as it is known before the current one runs."""

    # [R] slots of requests that continue, and the most tokens each may emit from the next step on.
    slots: Sequence[int]
    remaining: Sequence[int]
    # Requests of the current step, and their mean cached tokens.
    num_reqs: int
    context_len: float
    # Positions of its block that the drafter does not predict.
    spared: int = 0
    # Whether prompts can fill the next step, and whether any request may have nodes.
    backlog: bool = False
    wants_nodes: bool = True


@dataclass(frozen=True)
class Decision:
    """Whether the next step has trees, and why: a label of metrics."""

    drafts: bool
    reason: str
    # Cost of a plain step; infinite if it does not matter.
    plain_ms: float = math.inf
    # Whether the step ends with trees of copies alone; with `drafts`, only if `prefers_copies`.
    looks_up: bool = False
    # Whether no request of the batch can use a draft: each may emit one token at most.
    replies_end: bool = False
    # Whether the other kind of step seems to pay.
    is_trial: bool = False


class Controller:
    """Decides for one engine: `observe` what steps showed, `plan` the next one.

    Knows no device and no vLLM.

    Args:
        depth: D, the most draft tokens that a tree can have accepted.
        num_slots: S.
        latency: costs of steps.
        buffers: what the device reads; None if nothing does.
        looks_up: whether steps without a draft may have trees of copies.
        sees_copies: whether the host knows a step's copies before it drafts.
    """

    def __init__(
        self,
        depth: int,
        num_slots: int,
        latency: LatencyModel,
        buffers: CostBuffers | None = None,
        *,
        looks_up: bool = False,
        sees_copies: bool = False,
    ) -> None:
        self.latency, self.looks_up, self._sees_copies = latency, looks_up, sees_copies
        # [S] mean tokens that the latest copies of each request promised.
        self._copied = np.zeros(num_slots)
        # Whether the latest copies are worth verifying.
        self.copies_pay = False
        self.gains, self.remaining = Gains(), RemainingTokens(num_slots)
        # For trees of copies alone; only its kappa is used.
        self.copy_gains = Gains()
        self.size = StepSize()
        self._depth, self._buffers = depth, buffers
        self._probes = Probes()
        self._log_kappa = np.zeros((2, num_slots), dtype=np.float32)
        self._installed: CostArray | None = None
        # The cost of steps without a draft, and what it was computed from.
        self.copy_cost_ms: CostArray = np.ones(1, np.float32)
        self._copy_cost_of: tuple[CostArray | None, int, float] = (None, 0, 0.0)
        # The batch that `costs` is for, and whether nothing was learned since.
        self._priced, self._is_current = (1, -1, 0), False
        # Called for each whole step that was timed: whether it verified drafts, its rows, and its
        # predicted and measured milliseconds.
        self.on_step: Callable[[bool, int, float, float], None] | None = None
        self.costs = self.price(1, 1.0)

    # ---- requests ------------------------------------------------------------------------

    def restart(self, slot: int, tokens: int) -> None:
        """A new request takes the slot, and may emit `tokens` tokens."""
        self.gains.forget(slot)
        self.copy_gains.forget(slot)
        self._copied[slot] = 0.0
        self.remaining.restart(slot, tokens)

    def kappa_in_use(self, slots: np.ndarray, only_copies: bool) -> np.ndarray:
        """[R] kappa_r of the scores of the latest trees."""
        kappa: np.ndarray = np.exp(self._log_kappa[int(only_copies), slots])
        return kappa

    # ---- what steps showed ---------------------------------------------------------------

    def observe(self, steps: Sequence[StepTimes]) -> None:
        """Learn from the times of completed steps, oldest first.

        Consecutive plain steps with the same number of requests collapse into the last.
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

    def observe_copies(self, slots: np.ndarray, promised: np.ndarray, nodes: int | None) -> None:
        """Copies were found.

        Args:
            slots: [R] request slots.
            promised: [R] tokens of each copy that are expected to be right.
            nodes: how many nodes are worth verifying without a draft; None if there was one.
        """
        self._copied[slots] += _NEW_COPY * (promised - self._copied[slots])
        if nodes is not None:
            self.copies_pay = nodes > 0

    def teaching(self, slots: np.ndarray, copied: np.ndarray, only_copies: bool) -> np.ndarray:
        """[R] bool, the latest trees that `gains`, or `copy_gains`, learns from.

        A tree with drafts and a copy shows how good they are together, not how good the drafter is.

        Args:
            slots: [R] their request slots.
            copied: [R] tokens of each tree's copy that are expected to be right.
            only_copies: whether they are trees of copies alone.
        """
        if only_copies or not self.looks_up:
            return np.ones(len(slots), dtype=bool)
        self.gains.meet(slots.tolist())
        return copied <= 0

    @property
    def is_probing(self) -> bool:
        """Whether the next decision may depend on the latest times, so they cannot wait."""
        return self._probes.active

    def _report(self, step: StepTimes, on_step: Callable[[bool, int, float, float], None]) -> None:
        # A step that only verifies or only drafts is neither a plain nor a tree step.
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
            if self.looks_up:
                self._price_copies(num_reqs)
        return self.costs

    def _price_copies(self, num_reqs: int) -> None:
        """Install what steps without a draft cost, if it has changed."""
        curve, root_ms = self.costs.curve, self.costs.copies_ms / self.costs.factor
        of, reqs, before = self._copy_cost_of
        if of is curve and reqs == num_reqs and abs(root_ms / before - 1.0) < _COST_STEP:
            return
        self._copy_cost_of = curve, num_reqs, root_ms
        root = curve[min(num_reqs, len(curve) - 1)]
        self.copy_cost_ms = np.maximum(root_ms + curve - root, 0.1 * root_ms).astype(np.float32)
        if self._buffers is not None:
            self._buffers.set_copy_cost_ms(self.copy_cost_ms)

    def copy_step_ms(self, rows: int) -> float:
        """ms of a step with `rows` rows that ends without a draft."""
        cost = self.copy_cost_ms
        return self.costs.factor * float(cost[min(rows, len(cost) - 1)])

    def _gain_of_copies(
        self, slots: Sequence[int], remaining: Sequence[int], promised: np.ndarray
    ) -> tuple[float, float, np.ndarray]:
        """Steps with copies alone, or plain ones if these emit more tokens per time.

        promised: [R] tokens of each copy that are expected to be right.

        Returns:
            Their speed-up over plain steps, their ms, and [R] the expected tokens of each copy, 0
            where it is not worth verifying.
        """
        kappa = np.array([self.copy_gains.kappa_of(slot) for slot in slots])
        tokens = np.minimum(kappa * promised, np.array(remaining) - 1)
        tokens[tokens <= _MIN_COPY] = 0.0
        count, plain_ms = len(slots), self.costs.plain_ms
        # A copy is verified to about where it is expected to end.
        ms = self.copy_step_ms(count + int(np.ceil(tokens).sum()))
        gain = (1.0 + float(tokens.sum()) / count) * plain_ms / ms
        return (gain, ms, tokens) if gain > 1.0 else (1.0, plain_ms, 0.0 * tokens)

    def prefers_copies(
        self, slots: Sequence[int], remaining: Sequence[int], promised: np.ndarray, drafts: bool
    ) -> bool:
        """Whether copies alone pay more than a plain step, or than a draft together with copies.

        Args:
            slots: [R] request slots.
            remaining: [R] most tokens that each may emit from the next step on.
            promised: [R] tokens of each copy that are expected to be right.
            drafts: whether the alternative is a draft.
        """
        gain, _, tokens = self._gain_of_copies(slots, remaining, promised)
        if gain <= 1.0 or not drafts:
            return gain > 1.0
        drafted = self.gains.expected(slots, remaining)
        if drafted.unknown:
            return False
        both, nodes = _together(drafted, tokens)
        tree_ms = self.costs.tree_step_ms(len(slots) + nodes)
        return bool(gain >= both / len(slots) * self.costs.plain_ms / tree_ms)

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
            self._install_kappa(batch.slots, only_copies=False)
        else:
            self.gains.fade(batch.slots)
        if decision.looks_up:
            self._install_kappa(batch.slots, only_copies=True)
        else:
            self.copy_gains.fade(batch.slots)
        return decision

    def _weigh(self, batch: Batch, costs: StepEstimate) -> Decision:
        count, plain_ms = len(batch.slots), costs.plain_ms
        expected = self.gains.expected(batch.slots, batch.remaining)
        tokens, nodes = expected.tokens, round(expected.nodes)
        least, copy_ms, best = 1.0, plain_ms, 1.0
        if self.looks_up:
            promised = self._copied[batch.slots]
            best, ms, copied = self._gain_of_copies(batch.slots, batch.remaining, promised)
            if not self._sees_copies:
                least, copy_ms = best, ms
                if not expected.unknown:
                    tokens, nodes = _together(expected, copied)
        ratio = costs.tree_step_ms(count + nodes) / plain_ms
        # Without data, draft unless even full acceptance could not pay.
        for limit in expected.unknown:
            tokens += min(ratio, min(1.0 + self._depth, limit) * _FIRST_DOUBT)
        gain = tokens / count / ratio / least
        ratio *= plain_ms / copy_ms
        decision = Decision(gain >= 1.0 - 1e-9, "pays", plain_ms)
        if not decision.drafts:
            decision = replace(decision, reason="copies pay more" if least > 1 else "does not pay")
        kind = None
        if not expected.unknown:
            kind = self._probes.tries(
                decision.drafts,
                ratio,
                gain,
                new=sum(map(self.gains.is_new, batch.slots)) / count,
                plain_age=self.latency.plain_age(count),
                in_doubt=max(gain * least, best) < _DOUBT and self.gains.num_trees >= _KNOWN_TREES,
                ends_in=max(batch.remaining),
            )
        if kind is not None:
            decision = Decision(kind == "trees", f"trial of {kind}", plain_ms, is_trial=True)
        may = self.looks_up and (self._sees_copies or not decision.drafts)
        return replace(decision, looks_up=may and not decision.is_trial)

    def _install_kappa(self, slots: Sequence[int], only_copies: bool) -> None:
        if self._buffers is None or not slots:
            return
        gains, row = (self.gains, self.copy_gains)[only_copies], self._log_kappa[int(only_copies)]
        new = [math.log(gains.kappa_of(slot)) for slot in slots]
        if np.abs(row[slots] - new).max() > _KAPPA_STEP:
            row[slots] = new
            self._buffers.set_log_kappa(self._log_kappa)


def _together(drafted: Expected, copied: np.ndarray) -> tuple[float, int]:
    """Tokens and nodes of trees that hold drafts and copies.

    Args:
        drafted: what drafts alone bring to R requests.
        copied: [R] tokens that each copy brings.
    """
    # The draft's own tokens count only where the copy is wrong at once: with the probability
    # 1 / (1 + tokens) if its length is geometric.
    count = len(copied)
    mean = drafted.tokens / count - 1.0
    tokens = count + copied.sum() + mean * (1.0 / (1.0 + copied)).sum()
    return float(tokens), round(drafted.nodes + np.ceil(copied).sum())


def _same_plain(step: StepTimes, following: StepTimes) -> bool:
    """Whether both are plain steps with the same number of requests."""
    drafts = step.verified or step.drafted or following.verified or following.drafted
    return not drafts and step.num_reqs == following.num_reqs
