# SPDX-License-Identifier: Apache-2.0
"""Record the trees that a running bastion engine verifies.

`trees` is a `probe` of `benchmarks.harness.engine.Engine`: it is called with the `LLM` in the
engine's process, and returns a function that returns what was recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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


def _emitted(states: Any, slot: int) -> int:
    return int(states.total_len.gpu[slot]) - int(states.prompt_len.gpu[slot])
