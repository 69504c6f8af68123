# SPDX-License-Identifier: Apache-2.0
"""Lookup in replay: the product's own trees, copies and controller on a recording's drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from benchmarks.replay.policies import Controlled
from benchmarks.replay.simulation import Corpus, Outcome
from benchmarks.replay.steps import IntArray
from vllm_bastion.config import COPY_DEPTH
from vllm_bastion.policy.controller import Controller
from vllm_bastion.policy.cost.latency import LatencyModel
from vllm_bastion.policy.trees import Trees
from vllm_bastion.step_times import StepTimes

NODES = 63
_CPU = torch.device("cpu")


class Engine(Controlled):
    """What an engine on a CPU does in a step, but for the target and the drafter.

    A batch must not hold a request twice.

    Args:
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
        self._budget, self._drafter = budget, drafter
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
        controller = Controller(
            self._trees.depth,
            slots,
            latency,
            self._trees,
            copy_depth=self._trees.depth if lookup else 0,
            sees_copies=True,
        )
        super().__init__(corpus, name, controller, plans=budget is None)

    def timed(self, step: StepTimes) -> None:
        verified = step.rows > step.num_reqs
        copies = verified and not step.drafted
        self.controller.observe([replace(step, verified=verified, copies=copies)])

    def _begin(self, slots: IntArray, positions: IntArray) -> None:
        if self._trees.copies is not None:
            for slot in slots[positions == 1].tolist():
                self._trees.copies.restart(slot)
        prompts = self.corpus.recording.prompt_lens[slots]
        self._lengths[slots] = torch.from_numpy(prompts + positions).int()

    def _run(
        self, steps: Sequence[int], slots: IntArray, remaining: IntArray, context_len: float
    ) -> Outcome:
        drafts, copies_alone = self._kind(slots, remaining)
        if drafts or copies_alone:
            return self._verify(steps, slots, drafts)
        return Outcome([0] * len(steps), 0, drafted=False)

    def _kind(self, slots: IntArray, remaining: IntArray) -> tuple[bool, bool]:
        """Whether this step drafts, and whether it verifies copies alone, see `decide_again`."""
        copies, drafts = self._trees.copies, self._decision.drafts and self._drafter
        if self._budget is not None or copies is None or not self._decision.looks_up:
            return drafts, False
        rows = torch.from_numpy(slots)
        copies.find(rows)
        scores = copies.scores(slots, remaining - 1)
        if self.controller.prefers_copies(slots.tolist(), remaining.tolist(), scores, drafts):
            return False, True
        if not drafts:
            copies.give_up(rows)
        return drafts, False

    def _verify(self, steps: Sequence[int], slots: IntArray, drafts: bool) -> Outcome:
        """Grow the trees of a step, and walk them."""
        trees, recording = self._trees, self.corpus.recording
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
        self, slots: IntArray, nodes: list[int], accepted: list[int], *, only_copies: bool
    ) -> None:
        controller, trees = self.controller, self._trees
        raw = trees.promised.numpy()[slots] / controller.kappa_in_use(slots, only_copies)
        copied = trees.copied.numpy()[slots]
        controller.observe_trees(slots, raw, np.array(nodes), copied, only_copies)
        goes_on = np.ones(len(slots), dtype=bool)
        controller.observe_outcomes(slots, raw, np.array(accepted), copied, only_copies, goes_on)


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
