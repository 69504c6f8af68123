# SPDX-License-Identifier: Apache-2.0
"""How many of the scheduled placeholders are verified: N* of every request, every step.

vLLM's scheduler schedules ``1 + num_speculative_tokens`` tokens a decoding request and knows
nothing of trees. ``AdaptiveVerificationManager`` is vLLM's own seam for verifying fewer; this one
cuts every request to its share of the budget.

Only this file and ``lagged`` decide how many nodes are verified. Which nodes they are was decided
when the tree was built: its first ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
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
from vllm_bastion.policy.shares import even_split
from vllm_bastion.policy.trees import Published
from vllm_bastion.versions import capabilities


@dataclass
class VerifiedTrees:
    """The trees of one step, on the host. T rows with a tree; none in a step without."""

    slots: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    # [T] how many requests had the slot before: a slot of another count is another request's.
    tenants: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    # [T] most nodes of each; those verified, where the host knows.
    most: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    # Accepted tokens that they promise together, once that is known.
    promised: float | None = None


class CountedOutput(AsyncModelRunnerOutput):
    """A step's output with what the scheduler is to know, see `hooks.scheduler`.

    drafting: whether the step that is scheduled next has a use for placeholders. num_logits:
    [R + 1] running sum of root and nodes of the requests `req_ids`; a copy from the device may
    still fill it, one that was queued before the output's own.
    """

    def __init__(
        self,
        output: AsyncModelRunnerOutput,
        drafting: bool,
        req_ids: list[str],
        num_logits: np.ndarray,
    ) -> None:
        self._output, self._drafting = output, drafting
        self._req_ids, self._num_logits = req_ids, num_logits

    def get_output(self) -> ModelRunnerOutput:
        output = self._output.get_output()
        nodes = np.diff(self._num_logits) - 1
        num_verified = dict(zip(self._req_ids, nodes.tolist(), strict=True))
        StepReport(num_verified, self._drafting).attach(output)
        return output

    def get_kv_connector_output(self) -> Any:
        """What vLLM 0.33 asks an output for that failed."""
        return self._output.get_kv_connector_output()


class BastionVerificationManager(AdaptiveVerificationManager):
    """Exact: N* follows from the scores of the very trees it cuts; the host waits for them.

    For a fixed budget nobody waits. Built by the hook on
    ``maybe_create_adaptive_verification_manager``. The base class's buffers for per-position
    confidences are not used, so its constructor is not run: at N = 512 they would be the largest
    allocation of the plugin.
    """

    # Steps between a tree's scores and the step that they size and teach the gate about.
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
        # The runner's own buffer: FULL graphs read it, so it is filled and returned, not replaced.
        self.query_start_loc = query_start_loc
        # Slots whose draft tokens are placeholders: no tree was grown for them yet.
        self._treeless: set[int] = set()
        # Of the step at hand, in batch order: most nodes a request may have, nodes it gets, and
        # its rows that are no draft nodes.
        self._drafts = np.zeros(0, dtype=np.int32)
        self._kept = np.zeros(0, dtype=np.int32)
        self._rest = np.zeros(0, dtype=np.int32)
        self._req_ids: list[str] = []
        self._num_logits_np = np.zeros(1, dtype=np.int32)
        # The step at hand and those before it that the gate has yet to hear of, newest last.
        self._step = 0
        self._history = deque([VerifiedTrees() for _ in range(2 + self.lag)], 2 + self.lag)
        self._heard = False
        self._tenants = np.zeros(len(self.trees.row_slots), dtype=np.int64)

    # ---- the calls of a step, in order --------------------------------------------------

    def add_request(self, req_idx: int) -> None:
        """A new request, or a preempted one that comes back, takes the slot."""
        self._treeless.add(req_idx)
        self._tenants[req_idx] += 1
        if self.runtime.gate is not None:
            self.runtime.gate.forget(req_idx)

    def get_num_tokens(
        self,
        num_tokens_per_req: dict[str, int],
        draft_tokens: dict[str, list[int]],
    ) -> int:
        """Decide N* of every request. Returns the rows of the step: it picks the graph."""
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
        self._rest = tokens - drafts
        if self._treeless:
            drafts[[slot in self._treeless for slot in slots.tolist()]] = 0
        self._drafts, self._req_ids = drafts, order
        with gpu_sync_allowed():
            self._kept = self._choose(slots, drafts)
        rows = np.flatnonzero(drafts)
        most = drafts if self.lag else self._kept
        self._history[-1] = VerifiedTrees(slots[rows], self._tenants[slots[rows]], most[rows])
        self._hear()
        return int(self._kept.sum() + self._rest.sum())

    def _choose(self, slots: np.ndarray, drafts: np.ndarray) -> np.ndarray:
        """N* of every row, [R] int32, at most `drafts`."""
        trees = self.trees
        if trees.budget is not None:
            kept = np.minimum(self._columns(drafts), trees.budget).astype(np.int32)
        elif drafts.any():
            base_rows, news = int(self._rest.sum()), None
            if base_rows != len(slots) or trees.pruned:
                # The device priced a batch of decodes, and trees as they had grown. Prompt rows
                # share this step and its cost, and a grammar may have refused nodes, so the same
                # rule is asked again.
                trees.choose_again(slots, drafts, base_rows)
            else:
                news = trees.published(self._step - 1)
            if news is None:  # chosen again, or older trees of requests that had to sit out
                trees.publish(self._step - 1, slots)
                news = trees.published(self._step - 1)
                assert news is not None
            kept = np.minimum(news.num_verify[slots], drafts).astype(np.int32)
        else:
            kept = drafts
        room = self._room(len(slots))
        if kept.sum() > room:
            kept = even_split(room, kept)
        return kept

    def _columns(self, drafts: np.ndarray) -> np.ndarray:
        """[R] int32, most nodes each row may have, without asking the device.

        A tree can have fewer nodes than columns, where a candidate's probability is 0: rows past
        its end are verified and lead nowhere.
        """
        return np.minimum(drafts, self.trees.tree_size).astype(np.int32)

    def _room(self, num_reqs: int) -> int:
        """Nodes whose logits vLLM has memory for in one step."""
        return max(0, self.max_total_logits - num_reqs * self.num_bonus_tokens)

    def compact_batch(
        self,
        num_draft_tokens_per_req: np.ndarray,
        num_scheduled_tokens: np.ndarray,
        cu_num_logits_np: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        self._num_logits_np = np.zeros_like(cu_num_logits_np)
        np.cumsum(self._kept + self.num_bonus_tokens, out=self._num_logits_np[1:])
        return self._kept + self._rest, self._num_logits_np

    def reallocate_drafts(self, req_ids: list[str], idx_mapping: torch.Tensor) -> tuple[Any, ...]:
        # The CPU counts were exact, so the runner has already filled query_start_loc rightly.
        cu_num_logits = async_tensor_h2d(self._num_logits_np, device=self.trees.device)
        return self._reallocated(cu_num_logits, int(self._kept.sum()))

    def _reallocated(self, cu_num_logits: torch.Tensor, num_drafts: int) -> tuple[Any, ...]:
        """The values that this version of vLLM unpacks."""
        values = (cu_num_logits, self.query_start_loc, num_drafts)
        # The fourth is for sharded sampling, which is refused here.
        return (*values, None) if capabilities().returns_admitted_drafts else values

    def draft_next(self, slots: np.ndarray, context_len: float) -> bool:
        """Whether the coming step of the requests in `slots`, [R], gets trees."""
        gate, costs = self.runtime.gate, self.runtime.costs
        if gate is None or costs is None:
            return True
        self._hear()
        plain_ms = costs.plain_ms(len(slots), context_len)
        return gate.draft(slots.tolist(), self.trees.cost_ms_host, plain_ms)

    def record_confidences(self, confidence_probs: torch.Tensor, input_batch: InputBatch) -> None:
        """Called after ``propose``, at the end of a step: the batch has trees now, or none."""
        slots, drafted = input_batch.idx_mapping_np, self.runtime.drafted
        if drafted:
            self._treeless.difference_update(slots.tolist())
        else:
            self._treeless.update(slots.tolist())
        if self.trees.budget is None and (drafted or len(self._history[-1].slots)):
            self.trees.publish(self._step, slots if drafted else None)
        self._step += 1
        self._heard = False
        self._history.append(VerifiedTrees())

    # ---- what the gate learns -----------------------------------------------------------

    def _hear(self) -> None:
        """Once a step: take in what the step `lag` + 1 before this one has published.

        A fixed distance and not whatever has arrived: tensor-parallel ranks must hear the same.
        """
        if self._heard:
            return
        self._heard = True
        with gpu_sync_allowed():
            news = self.trees.published(self._step - 1 - self.lag)
        if news is not None:
            self._take_in(news)

    def _take_in(self, news: Published) -> None:
        gate = self.runtime.gate
        if gate is None:
            return
        before, trees = self._history[0], self._history[1]
        if before.promised is not None:
            accepted = news.emitted[before.slots] - 1
            gate.observe_step(before.promised, float(accepted.sum()))
        if len(trees.slots):
            chosen, promised = news.num_verify[trees.slots], news.promised[trees.slots]
            # A request near its end, or in a crowd, has fewer placeholders than it would use.
            nodes = np.minimum(chosen, trees.most)
            part = promised * nodes / np.maximum(chosen, 1)
            trees.promised = float(part.sum())
            live = self._tenants[trees.slots] == trees.tenants
            gate.observe_trees(trees.slots[live].tolist(), part[live], nodes[live])

    # ---- what others ask about the step -------------------------------------------------

    @property
    def drafts(self) -> np.ndarray:
        """[R] int32, most nodes each row of the step may have on the device."""
        return self._kept

    def counted(self, output: AsyncModelRunnerOutput) -> CountedOutput:
        """The output of the step that was launched last, with its counts of verified nodes."""
        req_ids, self._req_ids = self._req_ids, []
        counts, self._num_logits_np = self._num_logits_np, np.zeros(1, dtype=np.int32)
        return CountedOutput(output, self.runtime.drafting, req_ids, counts)

    def warm_up(self) -> None:
        """Compile what the first mixed step would wait for."""
        if self.trees.budget is None:
            self.trees.choose_again(np.zeros(1, np.int64), np.zeros(1, np.int32), 1)

    # ---- vLLM's own profiling -----------------------------------------------------------

    def batches_to_profile(self, capture_sizes: list[int]) -> Iterator[dict[str, int]]:
        """None here: `vllm_bastion.calibration.measure` measures, with graphs and without."""
        return iter(())

    def set_initial_cost_curves(self, samples: list[StepTimingSample]) -> None:
        """See `batches_to_profile`."""
