# SPDX-License-Identifier: Apache-2.0
"""Lookup in replay: the product's own trees, copies and controller on a recording's drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.replay.costs import CostSource
from benchmarks.replay.policies import Plain
from benchmarks.replay.simulation import Corpus, Outcome, Policy, Result, Truth, simulate
from vllm_bastion.config import COPY_DEPTH
from vllm_bastion.policy.controller import Batch, Controller, Decision
from vllm_bastion.policy.cost.latency import LatencyModel
from vllm_bastion.policy.trees import Trees
from vllm_bastion.step_times import StepTimes

NODES = 63
BATCHES = (1, 4, 16)
_BUDGETS = (16, 32, NODES)
_CPU = torch.device("cpu")


class Engine(Policy):
    """What an engine on a CPU does in a step, but for the target and the drafter.

    A request is a slot, so a batch must not hold one twice.

    Args:
        corpus: drafts, and what the target emits.
        latency: the controller's cost model.
        lookup: whether trees have copies of the context.
        budget: N of each request; None: the controller decides, also about plain steps.
        drafter: whether there is one; False: each step is plain, or verifies copies.
    """

    def __init__(
        self,
        corpus: Corpus,
        latency: LatencyModel,
        *,
        name: str,
        lookup: bool = True,
        budget: int | None = None,
        drafter: bool = True,
    ) -> None:
        self.name, self._corpus, self._budget, self._drafter = name, corpus, budget, drafter
        recording = corpus.recording
        texts = [recording.text(q) for q in range(len(recording.request_ids))]
        slots, most = len(texts), max(map(len, texts))
        self._trees = Trees(
            max_num_reqs=slots,
            max_num_tokens=latency.table.max_rows,
            num_nodes=NODES,
            depth=recording.depth,
            top_k=recording.topk_tokens.shape[2],
            budget=budget,
            device=_CPU,
            copy_depth=COPY_DEPTH,
        )
        self._lengths = torch.zeros(slots, dtype=torch.int32)
        if lookup:
            history = torch.zeros(slots, most, dtype=torch.int32)
            for row, text in zip(history, texts, strict=True):
                row[: len(text)] = torch.from_numpy(text)
            self._trees.look_up(history, self._lengths)
        self._controller = Controller(
            self._trees.depth, slots, latency, self._trees, looks_up=lookup, sees_copies=True
        )
        self._decision = Decision(True, "nothing is known")

    def step(self, steps: Sequence[int], context_len: float) -> Outcome:
        recording, controller = self._corpus.recording, self._controller
        slots = recording.step_requests[list(steps)].astype(np.int64)
        positions = recording.step_positions[list(steps)]
        remaining = np.array([self._corpus.remaining(step) for step in steps])
        new = slots[positions == 1]
        for slot in new.tolist():
            controller.restart(slot, 0)
            if self._trees.copies is not None:
                self._trees.copies.restart(slot)
        self._lengths[slots] = torch.from_numpy(recording.prompt_lens[slots] + positions).int()
        if len(new) and self._budget is None:
            self._decision = self._plan(slots, remaining, context_len)
        drafts, copies_alone = self._kind(slots, remaining)
        outcome = Outcome([0] * len(steps), 0, drafted=False)
        if drafts or copies_alone:
            outcome = self._verify(steps, slots, drafts)
        if self._budget is None:
            goes_on = remaining > 1  # one token at least is emitted
            self._decision = self._plan(slots[goes_on], remaining[goes_on] - 1, context_len)
        return outcome

    def timed(self, step: StepTimes) -> None:
        verified = step.rows > step.num_reqs
        copies = verified and not step.drafted
        self._controller.observe([replace(step, verified=verified, copies=copies)])

    def _plan(self, slots: np.ndarray, remaining: np.ndarray, context_len: float) -> Decision:
        batch = Batch(slots.tolist(), remaining.tolist(), len(slots), context_len)
        return self._controller.plan(batch)

    def _kind(self, slots: np.ndarray, remaining: np.ndarray) -> tuple[bool, bool]:
        """Whether this step drafts, and whether it verifies copies alone, see `decide_again`."""
        copies, drafts = self._trees.copies, self._decision.drafts and self._drafter
        if self._budget is not None or copies is None or not self._decision.looks_up:
            return drafts, False
        rows = torch.from_numpy(slots)
        copies.find(rows)
        promised = copies.promised(slots, remaining - 1)
        if self._controller.prefers_copies(slots.tolist(), remaining.tolist(), promised, drafts):
            return False, True
        if not drafts:
            copies.give_up(rows)
        return drafts, False

    def _verify(self, steps: Sequence[int], slots: np.ndarray, drafts: bool) -> Outcome:
        """Grow the trees of a step, and walk them."""
        trees, recording = self._trees, self._corpus.recording
        trees.bind_rows(torch.from_numpy(slots), torch.ones(len(slots), dtype=torch.int32))
        if drafts:
            tokens = torch.from_numpy(recording.topk_tokens[list(steps)])
            scores = torch.from_numpy(recording.scores[list(steps)].astype(np.float32))
            trees.grow_lattice(tokens, scores if scores.ndim == 4 else scores[:, :, None])
        else:
            trees.grow_copies(len(slots))
        nodes, accepted = trees.num_verify[torch.from_numpy(slots)].tolist(), []
        for row, (step, slot, count) in enumerate(zip(steps, slots, nodes, strict=True)):
            used = trees.tokens[row, :count].tolist(), trees.parents[slot, :count].tolist()
            accepted.append(_walk(*used, recording.continuation(step, trees.depth)))
        if self._budget is None:
            self._learn(slots, nodes, accepted, only_copies=not drafts)
        return Outcome(accepted, sum(nodes), drafted=drafts)

    def _learn(
        self, slots: np.ndarray, nodes: list[int], accepted: list[int], *, only_copies: bool
    ) -> None:
        controller, trees = self._controller, self._trees
        raw = trees.promised.numpy()[slots] / controller.kappa_in_use(slots, only_copies)
        gains = controller.copy_gains if only_copies else controller.gains
        copied = trees.copied.numpy()[slots]
        rows = np.flatnonzero(controller.teaching(slots, copied, only_copies))
        teach = slots[rows].tolist(), raw[rows].tolist()
        gains.add_trees(*teach, [nodes[row] for row in rows])
        gains.add_outcomes(*teach, [accepted[row] for row in rows])


def _walk(tokens: list[int], parents: list[int], truth: np.ndarray) -> int:
    """How many tokens of the truth lie on a path from the root; parent 0 is the root."""
    children = {(parent, token): i + 1 for i, (parent, token) in enumerate(zip(parents, tokens))}
    node = accepted = 0
    for token in truth.tolist():
        found = children.get((node, token))
        if found is None:
            break
        node, accepted = found, accepted + 1
    return accepted


def lookup_study(corpus: Corpus, source: CostSource) -> list[dict[str, Any]]:
    """Speed-up over plain decoding with and without copies, by batch and domain; and tau.

    The oracle takes the faster of all methods for each prompt, in hindsight.
    """
    rows = []
    for batch in BATCHES:
        results = {e.name: _replay(corpus, source, e, batch) for e in _engines(corpus, source)}
        plain = _replay(corpus, source, Plain(), batch)
        groups = {"all": corpus.interleaved()}
        if batch == 1:
            groups |= {domain: corpus.of_domain(domain) for domain in corpus.domains}
        for name, requests in groups.items():
            row: dict[str, Any] = {"batch": batch, "set": name}
            parts = {m: r if name == "all" else r.of(requests) for m, r in results.items()}
            base = plain if name == "all" else plain.of(requests)
            row |= {method: base.ms / part.ms for method, part in parts.items()}
            if batch == 1:
                every = [plain, *results.values()]
                best = sum(min(one.request_ms[r.index] for one in every) for r in requests)
                row["oracle"] = base.ms / best
            for method in ("adaptive", "with copies"):
                row[f"tau, {method}"] = parts[method].tau
            rows.append(row)
    return rows


def _engines(corpus: Corpus, source: CostSource) -> list[Engine]:
    def engine(name: str, **options: Any) -> Engine:
        return Engine(corpus, source.latency("ema_table"), name=name, **options)

    return [
        engine("adaptive", lookup=False),
        engine("with copies"),
        engine("copies alone", drafter=False),
        *(
            engine(f"N={n}{' with copies' * lookup}", lookup=lookup, budget=n)
            for n in _BUDGETS
            for lookup in (False, True)
        ),
    ]


def _replay(corpus: Corpus, source: CostSource, policy: Any, batch: int) -> Result:
    return simulate(corpus, policy, Truth(source.table), batch=batch)
