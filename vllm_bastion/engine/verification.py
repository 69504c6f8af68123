# SPDX-License-Identifier: Apache-2.0
"""How many of the scheduled placeholders are verified: N* of every request, every step.

The scheduler gives a decoding request its root and a share of the step's placeholders, and knows
nothing of trees. ``AdaptiveVerificationManager`` is vLLM's seam for verifying fewer; this subclass
cuts every request to its share of the budget, always a tree's first nodes.

The budget follows from the costs and scores that the controller has installed
(`policy.controller`); this file and ``lagged`` carry it out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from vllm.utils.gpu_sync_debug import gpu_sync_allowed
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.gpu.async_utils import StepTimingSample
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import sort_batch_req_ids
from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager
from vllm.v1.worker.gpu.states import RequestState

from vllm_bastion.carriers import StepReport
from vllm_bastion.engine.runtime import Runtime
from vllm_bastion.policy.controller import Batch, Decision
from vllm_bastion.policy.host_mirror import Published
from vllm_bastion.policy.remaining import NO_LIMIT
from vllm_bastion.policy.shares import even_split
from vllm_bastion.step_times import StepTimes
from vllm_bastion.telemetry.record import StepRecord
from vllm_bastion.telemetry.recorder import Recorder
from vllm_bastion.versions import capabilities


@dataclass
class VerifiedTrees:
    """The T trees that one step verifies, as the host knows them."""

    # [T] request slots
    slots: np.ndarray
    # [T] each slot's generation in that step; a different one means a different request.
    generations: np.ndarray
    # [T] nodes that are verified, or their limit if only the device knows them.
    max_nodes: np.ndarray
    # [T] kappa of each, a factor of its scores.
    kappa: np.ndarray
    # Whether they are copies alone, from which nothing is learned about the drafter.
    only_copies: bool = False
    # [T] accepted draft tokens expected of each; None until known.
    promised: np.ndarray | None = None
    # [T] tokens of each one's copy that are expected to be right; set with `promised`.
    copied: np.ndarray | None = None


_NONE = np.zeros(0, dtype=np.int64)
_NO_TREES = VerifiedTrees(_NONE, _NONE, _NONE, _NONE)


@dataclass(eq=False)
class CountedOutput(AsyncModelRunnerOutput):
    """A step's output with counts for the scheduler, see `hooks.scheduler`."""

    output: AsyncModelRunnerOutput
    # Whether the step that is scheduled next can use placeholders.
    drafting: bool
    req_ids: list[str]
    # [R + 1] running sum of each request's root and nodes, and `Copies.count_sources`. Their copies
    # from the device were queued before the output's own, and may be in flight until that arrives.
    num_logits: np.ndarray
    sources: np.ndarray | None
    # Completes the step's record; None if steps are not recorded.
    recorder: Recorder | None
    step: StepRecord | None
    # Times of completed steps, for all ranks.
    times: Sequence[StepTimes] = ()

    def get_output(self) -> ModelRunnerOutput:
        output = self.output.get_output()
        ends = self.num_logits.tolist()
        if ends[-1] == len(self.req_ids):  # roots only
            num_verified = dict.fromkeys(self.req_ids, 0)
        else:
            nodes = (end - begin - 1 for begin, end in pairwise(ends))
            num_verified = dict(zip(self.req_ids, nodes, strict=True))
        if self.recorder is not None and self.step is not None:
            trees = [name for name, count in num_verified.items() if count > 0]
            tokens, row = output.sampled_token_ids, output.req_id_to_index
            accepted = [(len(tokens[row[name]]) or 1) - 1 for name in trees]
            sources = () if self.sources is None else self.sources.ravel().tolist()
            nodes_of = [num_verified[name] for name in trees]
            self.recorder.finish(self.step, nodes_of, accepted, sources)
        StepReport(num_verified, self.drafting, self.step, self.times).attach(output)
        return output

    def get_kv_connector_output(self) -> Any:
        """vLLM 0.33 calls it on an output that failed."""
        return self.output.get_kv_connector_output()


class BastionVerificationManager(AdaptiveVerificationManager):
    """Exact timing: N* follows from the scores of the trees it cuts, and the host waits for them.

    With a fixed budget the host never waits. Built by the hook on
    ``maybe_create_adaptive_verification_manager``. The base class's constructor is not run: it only
    allocates buffers for per-position confidences, which are unused here and large with a large N.
    """

    # A step is sized by the scores of its own trees (0) or of those `lag` steps earlier.
    lag = 0

    def __init__(
        self,
        runtime: Runtime,
        req_states: RequestState,
        query_start_loc: torch.Tensor,
        num_bonus_tokens: int,
        max_total_logits: int,
    ) -> None:
        self.runtime, self.trees = runtime, runtime.trees
        self.req_states = req_states
        self.num_speculative_steps = req_states.num_speculative_steps
        self.num_bonus_tokens = num_bonus_tokens
        self.max_total_logits = max_total_logits
        # The runner's own buffer. FULL graphs read it, so it is written and never replaced.
        self.query_start_loc = query_start_loc
        # Request slots whose scheduled draft tokens are placeholders without a tree.
        self._treeless: set[int] = set()
        # The current step's requests in batch order, [R]: scheduled draft tokens, nodes to verify,
        # and rows that are not nodes (roots and prompt tokens).
        self._drafts = np.zeros(0, dtype=np.int32)
        self._num_verify = np.zeros(0, dtype=np.int32)
        self._num_nodes = 0  # sum of `_num_verify`
        self._plain_rows = np.zeros(0, dtype=np.int32)
        self._req_ids: list[str] = []
        self._num_logits_np = np.zeros(1, dtype=np.int32)
        # The current step's number, and the trees of it and of unobserved steps; newest last.
        self._step = 0
        self._history = deque([_NO_TREES] * (2 + self.lag), 2 + self.lag)
        self._has_observed = False
        self._only_copies = False  # whether the latest trees are copies alone
        # [S] number of requests that have used each slot.
        self._generations = np.zeros(len(self.trees.row_slots), dtype=np.int64)

    # ---- the calls of a step, in order --------------------------------------------------

    def add_request(self, req_idx: int) -> None:
        """A new request, or a preempted one that resumes, takes the slot."""
        self._treeless.add(req_idx)
        self._generations[req_idx] += 1
        states = self.req_states
        end = min(int(states.max_seq_len[req_idx]), states.max_model_len)
        if self.runtime.controller is not None:
            left = end - int(states.prefill_len.np[req_idx])
            self.runtime.controller.restart(req_idx, left)
        if self.runtime.reach is not None:
            self.runtime.reach.restart(req_idx)

    def get_num_tokens(
        self,
        num_tokens_per_req: dict[str, int],
        draft_tokens: dict[str, list[int]],
    ) -> int:
        """Decide N* of every request. Returns the step's rows, by which vLLM picks the graph."""
        order = sort_batch_req_ids(
            num_tokens_per_req, draft_tokens, self.num_speculative_steps + self.num_bonus_tokens
        )
        count = len(order)
        slot_of = self.req_states.req_id_to_index
        slots = np.fromiter((slot_of[r] for r in order), dtype=np.int64, count=count)
        drafts = np.fromiter(
            (len(draft_tokens.get(r, ())) for r in order), dtype=np.int32, count=count
        )
        tokens = np.fromiter((num_tokens_per_req[r] for r in order), dtype=np.int32, count=count)
        self._plain_rows = tokens - drafts
        if self._treeless:
            drafts[[slot in self._treeless for slot in slots.tolist()]] = 0
        self._drafts, self._req_ids = drafts, order
        with gpu_sync_allowed():
            self._num_verify = self._choose(slots, drafts)
        self._num_nodes = int(self._num_verify.sum())
        rows, controller = np.flatnonzero(drafts), self.runtime.controller
        max_nodes, with_tree = drafts if self.lag else self._num_verify, slots[rows]
        kappa = np.ones(len(rows))
        if controller is not None:
            kappa = controller.kappa_in_use(with_tree, self._only_copies)
        self._history[-1] = VerifiedTrees(
            with_tree, self._generations[with_tree], max_nodes[rows], kappa, self._only_copies
        )
        self._observe_past_step()
        return self._num_nodes + int(self._plain_rows.sum())

    def _choose(self, slots: np.ndarray, drafts: np.ndarray) -> np.ndarray:
        """N* of every row, [R] int32, at most `drafts`."""
        trees = self.trees
        if trees.budget is not None:
            num_verify = np.minimum(self._max_nodes(drafts), trees.budget).astype(np.int32)
        elif drafts.any():
            base_rows, published = int(self._plain_rows.sum()), None
            if base_rows != len(slots) or self.runtime.plan.grammar_columns:
                # The device chose for a batch of decodes and for trees as they were grown. Prompt
                # rows change the step's cost and a grammar may have removed nodes: choose again.
                trees.choose_again(slots, drafts, base_rows, self._only_copies)
            else:
                published = trees.published(self._step - 1)
            if published is None:  # chosen again, or trees of requests that skipped a step
                trees.publish(self._step - 1, slots, self._only_copies)
                published = trees.published(self._step - 1)
                assert published is not None
            num_verify = np.minimum(published.num_verify[slots], drafts).astype(np.int32)
        else:
            num_verify = drafts
        limit = self._max_step_nodes(len(slots))
        if trees.budget is not None:
            limit = min(limit, self._room_in_graphs())
        if num_verify.sum() > limit:
            num_verify = even_split(limit, num_verify)
        return num_verify

    def _room_in_graphs(self) -> int:
        """Most nodes with which the step fits a CUDA graph; no limit if it fits none.

        A step without a graph takes several times as long on an H100.
        """
        room = self.runtime.graph_sizes[-1:] - self._plain_rows.sum()
        return int(room[0]) if len(room) and room[0] >= 0 else NO_LIMIT

    def _max_nodes(self, drafts: np.ndarray) -> np.ndarray:
        """[R] int32, the most nodes that each row's tree can have.

        A tree can be smaller, if candidates have probability 0. Rows past its end are verified and
        never accepted.
        """
        return np.minimum(drafts, self.trees.tree_size).astype(np.int32)

    def _max_step_nodes(self, num_reqs: int) -> int:
        """Nodes whose logits vLLM has memory for in one step."""
        return max(0, self.max_total_logits - num_reqs * self.num_bonus_tokens)

    def compact_batch(
        self,
        num_draft_tokens_per_req: np.ndarray,
        num_scheduled_tokens: np.ndarray,
        cu_num_logits_np: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        self._num_logits_np = np.zeros_like(cu_num_logits_np)
        num_rows, num_logits = self.layout
        np.cumsum(num_logits, out=self._num_logits_np[1:])
        return num_rows, self._num_logits_np

    def reallocate_drafts(self, req_ids: list[str], idx_mapping: torch.Tensor) -> tuple[Any, ...]:
        # The host's counts are exact, so the runner has already written query_start_loc.
        cu_num_logits = async_tensor_h2d(self._num_logits_np, device=self.trees.device)
        return self._reallocated(cu_num_logits, self._num_nodes)

    def _reallocated(self, cu_num_logits: torch.Tensor, num_drafts: int) -> tuple[Any, ...]:
        """The values that this version of vLLM unpacks."""
        values = (cu_num_logits, self.query_start_loc, num_drafts)
        # The fourth is for sharded sampling, which is refused here.
        return (*values, None) if capabilities().returns_admitted_drafts else values

    def continuing(
        self, batch: InputBatch, num_sampled: torch.Tensor | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """The requests that emit in this step and in the next one.

        Args:
            num_sampled: [R] tokens that the step has emitted, on the host; None before sampling.

        Returns:
            Their request slots, [C], and the most tokens that each may emit from the next step on.
            Both are empty if none may emit more than one token.
        """
        self._observe_past_step()
        rows = _emitting(batch)
        slots = batch.idx_mapping_np[rows]
        emitted = 1 if num_sampled is None else num_sampled.numpy()[rows]
        assert self.runtime.controller is not None
        remaining = self.runtime.controller.remaining.after(slots, emitted)
        goes_on = remaining > 0
        slots, remaining = slots[goes_on], remaining[goes_on]
        if len(slots) and remaining.max() == 1:
            return slots[:0], remaining[:0]
        return slots, remaining

    def plan(self, batch: InputBatch, context_len: float, spared: int) -> Decision:
        """Let the controller decide about the step after the current one.

        Args:
            batch: of the current step, whose tokens are not sampled yet.
            context_len: mean cached tokens of its requests.
            spared: positions at the end of its block that the drafter does not predict.
        """
        controller = self.runtime.controller
        assert controller is not None
        slots, remaining = self.continuing(batch)
        decision = controller.plan(
            Batch(
                slots.tolist(),
                remaining.tolist(),
                batch.num_reqs,
                context_len,
                spared,
                self.runtime.plan.backlog,
                self.trees.wants_nodes(slots),
            )
        )
        if (recorder := self.runtime.recorder) is not None:
            recorder.decided(
                decision.drafts,
                decision.reason,
                len(slots),
                decision.plain_ms,
                looks_up=decision.looks_up,
            )
        return decision

    def record_confidences(self, confidence_probs: torch.Tensor, input_batch: InputBatch) -> None:
        """Called after ``propose``, at the end of a step: publish the trees that it grew."""
        slots, step = input_batch.idx_mapping_np, self.runtime.step
        controller = self.runtime.controller
        if step.grows:
            self._treeless.difference_update(slots.tolist())
        else:
            self._treeless.update(slots.tolist())
        if self.trees.budget is None and (step.grows or self.has_trees):
            self.trees.publish(self._step, slots if step.grows else None, step.looks_up)
        if (recorder := self.runtime.recorder) is not None:
            rows, requests = input_batch.num_tokens, len(slots)
            nodes = rows - requests
            if input_batch.has_prefill:
                requests -= int(np.count_nonzero(input_batch.is_prefilling_np))
                nodes = self._num_nodes if self._req_ids else 0
            tree_ms = 0.0
            if controller is not None:
                drafted = step.drafts or not controller.looks_up
                cost = controller.costs.tree_step_ms if drafted else controller.copy_step_ms
                tree_ms = cost(rows)
            recorder.ended(requests, nodes, rows, tree_ms)
        if step.grows:
            self._only_copies = step.looks_up
        if controller is not None:
            controller.remaining.emit(slots[_emitting(input_batch)])
        self._step += 1
        self._has_observed = False
        self._history.append(_NO_TREES)

    # ---- what the controller learns -----------------------------------------------------

    def _observe_past_step(self) -> None:
        """Once a step, read what the step `lag` + 1 before this one published.

        The distance is fixed, whatever has arrived: tensor-parallel ranks must decide alike.
        """
        if self._has_observed:
            return
        self._has_observed = True
        step = self._step - 1 - self.lag
        if self.trees.has_published(step):
            with gpu_sync_allowed():
                published = self.trees.published(step)
            assert published is not None
            self._observe(published)

    def _observe(self, published: Published) -> None:
        controller, recorder = self.runtime.controller, self.runtime.recorder
        if controller is None:
            return
        before, trees = self._history[0], self._history[1]
        live = self._is_live(before)
        slots = before.slots[live]
        # One token of each step was counted at the step's end.
        controller.remaining.emit(slots, published.emitted[slots] - 1)
        if before.promised is not None:
            assert before.copied is not None
            controller.observe_outcomes(
                before.slots,
                before.promised / before.kappa,
                published.emitted[before.slots] - 1,
                before.copied,
                before.only_copies,
                live,
            )
            if recorder is not None:
                accepted = int(published.emitted[slots].sum()) - len(slots)
                recorder.yielded(float(before.promised[live].sum()), accepted)
        if len(trees.slots):
            chosen = published.num_verify[trees.slots]
            promised = published.promised[trees.slots]
            # A request near its end or in a large batch has fewer placeholders than N*.
            nodes = np.minimum(chosen, trees.max_nodes)
            trees.promised = promised * nodes / np.maximum(chosen, 1)
            live = self._is_live(trees)
            trees.copied = published.copied[trees.slots]
            controller.observe_trees(
                trees.slots[live],
                trees.promised[live] / trees.kappa[live],
                nodes[live],
                trees.copied[live],
                trees.only_copies,
            )
        if controller.looks_up and published.grown_for is not None:
            grown = published.grown_for
            chosen = None
            if published.only_copies:
                tokens = float(published.promised[grown].sum())
                chosen = int(published.num_verify[grown].sum()), tokens
            promised = np.minimum(published.copied[grown], self.trees.node_limits_host[grown])
            controller.observe_copies(grown, promised, chosen)

    def _is_live(self, trees: VerifiedTrees) -> np.ndarray:
        """[T] bool, whether the slots still belong to the trees' requests."""
        return self._generations[trees.slots] == trees.generations

    # ---- the step's data for other adapters --------------------------------------------

    @property
    def has_trees(self) -> bool:
        """Whether the step may verify trees, whose requests' emitted tokens are published."""
        return len(self._history[-1].slots) > 0

    @property
    def drafts(self) -> np.ndarray:
        """[R] int32, most nodes each row of the step may have on the device."""
        return self._num_verify

    @property
    def layout(self) -> tuple[np.ndarray, np.ndarray]:
        """[R] rows and logits of each request, as the host trimmed the step."""
        num_logits = self._num_verify + self.num_bonus_tokens
        return self._num_verify + self._plain_rows, num_logits

    def counted(self, output: AsyncModelRunnerOutput) -> CountedOutput:
        """The output of the step launched last, with its counts of verified nodes."""
        req_ids, self._req_ids = self._req_ids, []
        counts, self._num_logits_np = self._num_logits_np, np.zeros(1, dtype=np.int32)
        recorder = self.runtime.recorder
        step = None if recorder is None else recorder.take()
        times = self.runtime.completed_steps() if self.runtime.learns_with_others else ()
        sources, self.runtime.sources = self.runtime.sources, None
        return CountedOutput(
            output, self.runtime.step.announces, req_ids, counts, sources, recorder, step, times
        )

    def warm_up(self) -> None:
        """Compile the ops of a step with prompt rows."""
        if self.trees.budget is None:
            self.trees.choose_again(np.zeros(1, np.int64), np.zeros(1, np.int32), 1)

    # ---- vLLM's own profiling -----------------------------------------------------------

    def batches_to_profile(self, capture_sizes: list[int]) -> Iterator[dict[str, int]]:
        """None: `vllm_bastion.calibration.measure` times steps, with graphs and without."""
        return iter(())

    def set_initial_cost_curves(self, samples: list[StepTimingSample]) -> None:
        """See `batches_to_profile`."""


def _emitting(batch: InputBatch) -> np.ndarray | slice:
    """Rows of the batch whose requests emit: all but prompts that continue in the next step."""
    if not batch.has_prefill:
        return slice(None)
    seen = batch.num_computed_tokens_np + batch.num_scheduled_tokens
    return np.asarray(seen >= batch.prefill_len_np)
