# SPDX-License-Identifier: Apache-2.0
"""The controller: decides before a step whether it ends with a draft, and prices the next step.

With R requests, g_r the draft tokens that a tree of request r is expected to have accepted
(`Gains`), n_r its nodes, and the costs P of a plain step and C(n) of a step with trees and n target
rows (`LatencyModel`), the speed-up of trees over plain steps, in tokens per time, is e^x with

    x = ln( sum_r (1 + g_r) / R ) - ln( C(R + sum_r n_r) / P )

The next step has trees, so the current one ends with a draft, if x >= 0.

With lookup, a step without a draft ends with trees of copies alone, which cost no drafter pass: a
step with n rows takes Q + C(n) - C(R), with Q what it takes with one row for each request. The path
scores of a copy's tokens are known with or without a draft, and have a kappa_r of their own. As
many of the best tokens as pay are counted, as in `choose_budget`. A draft must beat the copies that
could be verified without one: `plan` estimates their scores from the latest copies, and
`prefers_copies` takes those of the current ones, where the host knows them before it drafts. To
look for copies takes time itself: where they save less, few steps without a draft look (`_looks`).

Once the trees exist, the number of verified nodes follows from their scores kappa_r rho and the
same costs. `bastion_kernels.choose_budget` chooses it on the device, from buffers that `plan`
writes; `StepSize` on the host, where a step is sized before its scores are known.

Steps of one kind yield no data on the other kind: `Probes` tries it now and then. Without data on
trees, draft unless even full acceptance could not pay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from vllm_bastion.policy.cost.latency import STALE, LatencyModel, StepEstimate
from vllm_bastion.policy.cost.table import CostArray, context_bucket
from vllm_bastion.policy.gains import Expected, Gains
from vllm_bastion.policy.probes import DOUBT, Probes
from vllm_bastion.policy.remaining import RemainingTokens
from vllm_bastion.policy.step_size import StepSize
from vllm_bastion.step_times import StepTimes

# Factor by which calibrated costs may be wrong for the very first trees, before any is timed.
_FIRST_DOUBT = 2.5
# Trees after which their mean gain is trusted.
_KNOWN_TREES = 16
# Weight of a new copy's expected tokens in their mean; change of Q after which costs are installed
# again.
_NEW_COPY, _COST_STEP = 0.25, 0.05
# Weight of a new look in the mean time that copies save. Where that is less than what a look takes,
# one of 4 steps still looks, and after each such look one of twice as many, up to 32.
_NEW_LOOK, _FIRST_WAIT, _LAST_WAIT = 0.05, 4, 32
# kappa is installed again when its logarithm has changed by this much: it is copied to the device.
# The change is looked at for new batches, and else in one of so many steps.
_KAPPA_STEP, _KAPPA_EVERY = 0.05, 8


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


class _CopiesAlone(NamedTuple):
    """A step with trees of copies alone that pays."""

    # Its speed-up over a plain step, and its ms.
    gain: float
    ms: float
    # [R] expected tokens of the nodes verified of each copy, and all these nodes.
    tokens: np.ndarray
    nodes: int

    def together(self, drafted: Expected) -> tuple[float, int]:
        """Tokens and nodes of trees that hold these copies and drafts.

        drafted: what drafts alone bring to the R requests.
        """
        # The draft's own tokens count only where the copy is wrong at once: with the probability
        # 1 / (1 + tokens) if its length is geometric.
        count = len(self.tokens)
        mean = drafted.tokens / count - 1.0
        tokens = count + self.tokens.sum() + mean * (1.0 / (1.0 + self.tokens)).sum()
        return float(tokens), round(drafted.nodes) + self.nodes


class Controller:
    """Decides for one engine: `observe` what steps showed, `plan` the next one.

    Knows no device and no vLLM.

    Args:
        depth: D, the most draft tokens that a tree can have accepted.
        num_slots: S.
        latency: costs of steps.
        buffers: what the device reads; None if nothing does.
        copy_depth: most tokens of a copy; 0: there is no lookup.
        sees_copies: whether the host knows a step's copies before it drafts.
    """

    def __init__(
        self,
        depth: int,
        num_slots: int,
        latency: LatencyModel,
        buffers: CostBuffers | None = None,
        *,
        copy_depth: int = 0,
        sees_copies: bool = False,
    ) -> None:
        self.latency, self._sees_copies = latency, sees_copies
        self.looks_up = copy_depth > 0
        self._copy_depths = np.arange(1, copy_depth + 1)
        # [S] mean tokens that the latest copies of each request promised.
        self._copied = np.zeros(num_slots)
        # Whether the latest copies are worth verifying.
        self.copies_pay = False
        # Mean ms that the copies of a look save, steps without a draft since the last one, and how
        # many to wait where looks do not pay.
        self._saved_ms, self._not_looked = latency.estimate(1, 1.0).plain_ms, 0
        self._look_wait = _FIRST_WAIT
        self.gains, self.remaining = Gains(), RemainingTokens(num_slots)
        # For trees of copies alone; only its kappa is used.
        self.copy_gains = Gains()
        self.size = StepSize()
        self._depth, self._buffers = depth, buffers
        self._probes = Probes()
        self._log_kappa = np.zeros((2, num_slots), dtype=np.float32)
        # The batch that each was looked at for last, and steps since then.
        self._kappa_checked: list[tuple[Sequence[int], int]] = [((), 0)] * 2
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
        self._kappa_checked = [((), 0)] * 2
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

    def observe_copies(
        self, slots: np.ndarray, promised: np.ndarray, chosen: tuple[int, float] | None
    ) -> None:
        """Copies were found.

        Args:
            slots: [R] request slots.
            promised: [R] tokens of each copy that are expected to be right.
            chosen: how many nodes are best without a draft, and the accepted tokens expected of
                them; None if there was one.
        """
        self._copied[slots] += _NEW_COPY * (promised - self._copied[slots])
        if chosen is not None:
            (nodes, tokens), reqs = chosen, len(slots)
            as_plain_ms = (1.0 + tokens / reqs) * self.costs.plain_ms
            saved_ms = as_plain_ms - self.copy_step_ms(reqs + nodes)
            self.copies_pay = nodes > 0 and saved_ms > 0.0
            self._saved_ms += _NEW_LOOK * (saved_ms * self.copies_pay - self._saved_ms)

    def observe_trees(
        self,
        slots: np.ndarray,
        promised: np.ndarray,
        nodes: np.ndarray,
        copied: np.ndarray,
        only_copies: bool,
    ) -> None:
        """Trees were verified, or are about to be.

        Args:
            slots: [R] their request slots.
            promised: [R] sums of their path scores, without kappa.
            nodes: [R] nodes verified.
            copied: [R] tokens of each tree's copy that are expected to be right.
            only_copies: whether they are trees of copies alone.
        """
        gains, rows = self._learning(copied, only_copies)
        gains.add_trees(slots[rows].tolist(), promised[rows].tolist(), nodes[rows].tolist())
        if gains is self.gains:
            gains.meet(slots[~rows].tolist())

    def observe_outcomes(
        self,
        slots: np.ndarray,
        promised: np.ndarray,
        accepted: np.ndarray,
        copied: np.ndarray,
        only_copies: bool,
        goes_on: np.ndarray,
    ) -> None:
        """The outcomes of trees that `observe_trees` was called with.

        Args:
            accepted: [R] draft tokens accepted.
            goes_on: [R] bool, False where another request has taken the slot since.
            others: see `observe_trees`.
        """
        gains, rows = self._learning(copied, only_copies)
        own, last = rows & goes_on, rows & ~goes_on
        gains.add_outcomes(slots[own].tolist(), promised[own].tolist(), accepted[own].tolist())
        gains.add_last_outcomes(promised[last].tolist(), accepted[last].tolist())

    def _learning(self, copied: np.ndarray, only_copies: bool) -> tuple[Gains, np.ndarray]:
        """What learns from R trees, and [R] bool, from which of them.

        A tree with drafts and a copy shows how good they are together, not how good the drafter is.
        """
        if only_copies:
            return self.copy_gains, np.ones(len(copied), dtype=bool)
        return self.gains, np.logical_or(copied <= 0, not self.looks_up)

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

    def _copies_alone(
        self, slots: Sequence[int], remaining: Sequence[int], scores: np.ndarray
    ) -> _CopiesAlone | None:
        """Steps with copies alone; None if plain steps emit as many tokens per time.

        scores: [R, L] path scores of the copies' tokens, without kappa; 0 past their ends.
        """
        count, plain_ms = len(slots), self.costs.plain_ms
        scores = scores * [[self.copy_gains.kappa_of(slot)] for slot in slots]
        if min(remaining) <= len(self._copy_depths):
            scores[self._copy_depths >= np.array(remaining)[:, None]] = 0.0
        best_first = np.sort(scores, axis=None)[::-1]
        cost = self.copy_cost_ms[count + 1 :][: len(best_first)]
        if not len(cost):
            return None
        emitted = count + np.cumsum(best_first[: len(cost)])
        best = int((emitted / cost).argmax())
        ms = self.costs.factor * float(cost[best])
        gain = float(emitted[best]) / count * plain_ms / ms
        if gain <= 1.0 or best_first[best] <= 0.0:
            return None
        verified = scores >= best_first[best]
        tokens = (scores * verified).sum(axis=1)
        return _CopiesAlone(gain, ms, tokens, int(verified.sum()))

    def prefers_copies(
        self, slots: Sequence[int], remaining: Sequence[int], scores: np.ndarray, drafts: bool
    ) -> bool:
        """Whether copies alone pay more than a plain step, or than a draft together with copies.

        Args:
            slots: [R] request slots.
            remaining: [R] most tokens that each may emit from the next step on.
            scores: [R, L] see `Copies.scores`.
            drafts: whether the alternative is a draft.
        """
        copies = self._copies_alone(slots, remaining, scores)
        if copies is None or not drafts:
            return copies is not None
        drafted = self.gains.expected(slots, remaining)
        if drafted.unknown:
            return False
        both, nodes = copies.together(drafted)
        tree_ms = self.costs.tree_step_ms(len(slots) + nodes)
        return copies.gain >= both / len(slots) * self.costs.plain_ms / tree_ms

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
        plain_age = self.latency.plain_age(count)
        # A host that sees copies before it drafts weighs them then. Until then they only tell
        # whether a probe of plain steps, due after STALE steps, could pay.
        if self.looks_up and (not self._sees_copies or plain_age >= STALE):
            copies = self._expected_copies(batch)
            best = copies.gain if copies else 1.0
            if copies and not self._sees_copies:
                least, copy_ms = copies.gain, copies.ms
                if not expected.unknown:
                    tokens, nodes = copies.together(expected)
        ratio = costs.tree_step_ms(count + nodes) / plain_ms
        # Without data, draft unless even full acceptance could not pay.
        for limit in expected.unknown:
            tokens += min(ratio, min(1.0 + self._depth, limit) * _FIRST_DOUBT)
        gain = tokens / count / ratio / least
        ratio *= plain_ms / copy_ms
        drafts, is_trial = gain >= 1.0 - 1e-9, False
        reason = "pays" if drafts else "copies pay more" if least > 1 else "does not pay"
        if not expected.unknown:
            kind = self._probes.tries(
                drafts,
                ratio,
                gain,
                new=sum(map(self.gains.is_new, batch.slots)) / count,
                plain_age=plain_age,
                in_doubt=max(gain * least, best) < DOUBT and self.gains.num_trees >= _KNOWN_TREES,
                ends_in=max(batch.remaining),
            )
            if kind is not None:
                drafts, reason, is_trial = kind == "trees", f"trial of {kind}", True
        looks_up = not is_trial and self._looks(drafts)
        return Decision(drafts, reason, plain_ms, looks_up, is_trial=is_trial)

    def _expected_copies(self, batch: Batch) -> _CopiesAlone | None:
        """Copies alone, as if the lengths of right copies were geometric."""
        mean = self._copied[batch.slots, None]
        scores = np.repeat(mean / (1.0 + mean), len(self._copy_depths), axis=1).cumprod(axis=1)
        return self._copies_alone(batch.slots, batch.remaining, scores)

    def _looks(self, drafts: bool) -> bool:
        """Whether a step that is no trial looks for copies alone."""
        if drafts:
            return self.looks_up and self._sees_copies
        self._not_looked += 1
        if self._saved_ms >= self.costs.look_ms:
            self._look_wait = _FIRST_WAIT
        elif self._not_looked >= self._look_wait:
            self._look_wait = min(2 * self._look_wait, _LAST_WAIT)
        else:
            return False
        self._not_looked = 0
        return self.looks_up

    def _install_kappa(self, slots: Sequence[int], only_copies: bool) -> None:
        if self._buffers is None or not slots:
            return
        batch, steps = self._kappa_checked[only_copies]
        if batch == slots and steps < _KAPPA_EVERY:
            self._kappa_checked[only_copies] = batch, steps + 1
            return
        self._kappa_checked[only_copies] = slots, 1
        gains, row = (self.gains, self.copy_gains)[only_copies], self._log_kappa[int(only_copies)]
        new = [math.log(gains.kappa_of(slot)) for slot in slots]
        if np.abs(row[slots] - new).max() > _KAPPA_STEP:
            row[slots] = new
            self._buffers.set_log_kappa(self._log_kappa)


def _same_plain(step: StepTimes, following: StepTimes) -> bool:
    """Whether both are plain steps of one kind with the same number of requests."""
    drafts = step.verified or step.drafted or following.verified or following.drafted
    alike = step.num_reqs == following.num_reqs and step.looked == following.looked
    return not drafts and alike
