# SPDX-License-Identifier: Apache-2.0
"""Record the trees that a running bastion engine verifies, and the drafts they are grown from.

Each function is a `probe` of `benchmarks.harness.engine.Engine`: it is called with the `LLM` in the
engine's process, and returns a function that returns what was recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.steps import model_runner, request_index


@dataclass(frozen=True)
class SeenTree:
    """One verified tree. Node 0 is the root; column j of the arrays is node j + 1."""

    request: int
    position: int  # tokens emitted before this step; the last of them is the root
    root: int
    tokens: list[int]
    parents: list[int]
    log_rho: list[float]
    num_verified: int
    path: list[int]  # accepted node numbers from the root down, root first
    emitted: list[int]  # tokens of the path, then the target's own

    @property
    def accepted(self) -> int:
        return len(self.path) - 1

    def chain_length(self) -> int:
        """Length of the path's start in which each node is its parent's best child."""
        best: dict[int, int] = {}
        for column, parent in enumerate(self.parents):
            best.setdefault(parent, column + 1)
        pairs = zip(self.path, self.path[1:])
        hits = [best[parent] == node for parent, node in pairs]
        return hits.index(False) if False in hits else len(hits)


@dataclass(frozen=True)
class SeenDraft:
    """The drafter's top-K of one step."""

    request: int
    position: int  # tokens emitted when it was drafted
    tokens: NDArray[np.int32]  # [D, K]
    logprobs: NDArray[np.float16]  # [D, K], before any head over the candidates
    # [D, K, K] of each candidate given each one of the depth above, if the drafter has such a head.
    transitions: NDArray[np.float16] | None = None


def trees(llm: Any) -> Callable[[], list[SeenTree]]:
    """Every verified tree of an engine with `max_num_seqs` 1."""
    from vllm_bastion.engine.sampler import TreeRejectionSampler

    runner = model_runner(llm)
    grown, states = runner.speculator.trees, runner.req_states
    seen: list[SeenTree] = []
    walk = TreeRejectionSampler.__call__

    def call(self: Any, logits: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        output = walk(self, logits, batch, *args, **kwargs)
        assert batch.num_reqs == 1, "the nodes' tokens are stored by batch row"
        slot = int(batch.idx_mapping_np[0])
        fed = batch.input_ids[batch.logits_indices].tolist()
        verified = len(fed) - 1
        if verified:
            size = int(grown.size[slot])
            tokens = grown.tokens[0, :size].tolist()
            assert tokens[:verified] == fed[1:], "the tree is not the one that was verified"
            seen.append(
                SeenTree(
                    request=request_index(batch.req_ids[0]),
                    position=_emitted(states, slot),
                    root=fed[0],
                    tokens=tokens,
                    parents=grown.parents[slot, :size].tolist(),
                    log_rho=grown.log_rho[slot, :size].tolist(),
                    num_verified=verified,
                    path=[node for node in grown.path[0].tolist() if node >= 0],
                    emitted=output.sampled_token_ids[0, : int(output.num_sampled[0])].tolist(),
                )
            )
        return output

    TreeRejectionSampler.__call__ = call
    return lambda: seen


def drafts(llm: Any) -> Callable[[], list[SeenDraft]]:
    """Every draft of an engine that verifies nothing, and so emits one token per step.

    Decoding is lossless and a draft depends on the prefix alone, not on the budget. Without
    verification the engine drafts at every position.
    """
    runner = model_runner(llm)
    speculator, states = runner.speculator, runner.req_states
    speculator.trees.budget = 0
    _draft_always()
    propose, scored = speculator.propose, _scores(speculator)
    seen: list[SeenDraft] = []

    def watched(batch: Any, *args: Any, **kwargs: Any) -> Any:
        proposed = propose(batch, *args, **kwargs)
        if kwargs.get("dummy_run"):
            return proposed
        for row, (name, slot) in enumerate(zip(batch.req_ids, batch.idx_mapping_np.tolist())):
            position = _emitted(states, slot)
            if position > 0:  # at 0 the prompt is not finished: there is no root yet
                seen.append(SeenDraft(request_index(name), position, *scored(row)))
        return proposed

    speculator.propose = watched
    return lambda: seen


def _draft_always() -> None:
    """End every step with a draft, also where the budget is 0 and no draft would be verified."""
    from vllm_bastion.engine import planning

    decide = planning._decide

    def decided(*given: Any) -> Any:
        return replace(decide(*given), drafts=True)

    planning._decide = decided


def _scores(speculator: Any) -> Callable[[int], tuple[Any, ...]]:
    """A function that returns the last draft of a batch row: the arrays of a `SeenDraft`."""
    trees = speculator.trees
    grow, grow_transitions = speculator._grow_trees, trees.grow_transitions
    head: dict[str, Any] = {}

    def grow_watched(hidden: Any, num_reqs: int) -> None:
        head["states"] = hidden
        grow(hidden, num_reqs)

    def grow_transitions_watched(candidates: Any, scores: Any, *more: Any) -> None:
        logits = speculator.model.compute_logits(head["states"]).float()
        own = logits.log_softmax(-1).gather(1, candidates.flatten(0, 1).long())
        head["scores"] = candidates, own.view(candidates.shape), scores.float().log_softmax(-1)
        grow_transitions(candidates, scores, *more)

    def last(row: int) -> tuple[Any, ...]:
        arrays = head.get("scores", (trees.top_tokens, trees.top_logprobs))
        kinds = np.int32, np.float16, np.float16
        return tuple(a[row].numpy().astype(kind) for a, kind in zip(arrays, kinds, strict=False))

    speculator._grow_trees, trees.grow_transitions = grow_watched, grow_transitions_watched
    return last


def _emitted(states: Any, slot: int) -> int:
    return int(states.total_len.gpu[slot]) - int(states.prompt_len.gpu[slot])
