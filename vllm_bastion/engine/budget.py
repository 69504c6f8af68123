# SPDX-License-Identifier: Apache-2.0
"""How many nodes of the drafted trees a step verifies: the paper's rule, by vLLM's manager.

vLLM's ``AdaptiveVerificationManager`` times its own forward passes at start and takes the number of
drafts with the most expected tokens per time. Its survival probability of a draft is a tree's path
score rho, so this subclass gives it trees: with n nodes in R requests the step's rate is

    (R + sum of the n best rho) / (draft(R) + verify(R + n))

and the n best nodes of the batch are verified, which in every tree are its first ones. What steps
really take, host and long contexts included, corrects the divisor by a line that the scheduler
fits to the steps' own times (`scheduler.step_line`); it comes with the step (`StepPlan.line`).

Exact timing (a CPU, LoRA): the scores are those of the trees that are cut. Lagged (CUDA): the
previous step's scores size the step, and the device gives the nodes to its own best trees
(`take_best`), so the host waits for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from vllm.utils.gpu_sync_debug import gpu_sync_allowed
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.gpu.async_utils import async_copy_to_np
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import BatchReqState
from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager
from vllm.v1.worker.gpu.states import RequestState

from bastion_kernels import take_best
from vllm_bastion.attached import StepReport
from vllm_bastion.engine.runtime import Runtime
from vllm_bastion.engine.scores import EarlierScores
from vllm_bastion.platform import current_host
from vllm_bastion.policy.cost import Estimator
from vllm_bastion.scheduler.gate import Arm
from vllm_bastion.scheduler.step_line import corrected
from vllm_bastion.versions import capabilities


@dataclass(eq=False)
class CountedOutput(AsyncModelRunnerOutput):
    """A step's output with counts for the scheduler, see `StepReport`."""

    output: AsyncModelRunnerOutput
    req_ids: list[str]
    # [R + 1] running sum of each request's bonus token and nodes, and counts by `accept_path`.
    # Their copies from the device were queued before the output's own, and arrived before it.
    num_logits: np.ndarray
    sources: np.ndarray | None
    expected: float
    verified: Arm
    predicted_ms: float

    def get_output(self) -> ModelRunnerOutput:
        output = self.output.get_output()
        ends = self.num_logits.tolist()
        if ends[-1] == len(self.req_ids):  # bonus tokens only
            num_verified = dict.fromkeys(self.req_ids, 0)
        else:
            nodes = [end - begin - 1 for begin, end in pairwise(ends)]
            num_verified = dict(zip(self.req_ids, nodes, strict=True))
        sources: Sequence[int] = (
            () if self.sources is None else self.sources.sum(0).ravel().tolist()
        )
        StepReport(num_verified, self.verified, self.expected, sources, self.predicted_ms).attach(
            output
        )
        return output

    def get_kv_connector_output(self) -> Any:
        """vLLM 0.33 calls it on an output that failed."""
        return self.output.get_kv_connector_output()


class TreeBudgetManager(AdaptiveVerificationManager):
    """Built by the hook on ``maybe_create_adaptive_verification_manager``.

    The base class's constructor is not run: it allocates copies of per-position confidences on the
    device, which trees already have. `cost_tables` is the base class's: ms of a draft by requests,
    and of a target's pass by rows.

    Args:
        max_rows: most rows of a step with nodes, prompts included.
        lagged: whether the previous step's scores size a step.
    """

    def __init__(
        self,
        runtime: Runtime,
        req_states: RequestState,
        query_start_loc: torch.Tensor,
        num_bonus_tokens: int,
        max_total_logits: int,
        max_rows: int,
        *,
        lagged: bool,
    ) -> None:
        self.runtime, self.trees, self.lagged = runtime, runtime.trees, lagged
        self.req_states = req_states
        self.num_speculative_steps = req_states.num_speculative_steps
        self.num_bonus_tokens = num_bonus_tokens
        self.max_total_logits, self.max_rows = max_total_logits, max_rows
        # The runner's own buffer. FULL graphs read it, so it is written and never replaced.
        self.query_start_loc = query_start_loc
        self.cost_tables: tuple[np.ndarray, np.ndarray] | None = None
        self._cudagraph_limit = 0
        # The paper's, in place of the profile's curve; and the step that it last predicted: rows,
        # requests and mean cached tokens.
        self.estimator: Estimator | None = None
        self._timed: tuple[int, int, float] | None = None
        num_slots = len(self.trees.row_slots)
        # [S] whether the slot's request has a tree; its placeholders are empty otherwise.
        self._has_tree = np.zeros(num_slots, dtype=bool)
        # The current step's requests in batch order, [R]: most nodes, nodes to verify, and rows
        # that are not nodes (bonus and prompt tokens).
        self._limits = self._num_verify = self._plain_rows = np.zeros(0, dtype=np.int32)
        self._num_nodes = self._num_rows = 0  # sums of `_num_verify` and `_plain_rows`
        self._columns = np.arange(self.trees.num_nodes)
        self._slots = np.zeros(0, dtype=np.int64)
        self._req_ids: list[str] = []
        self._num_logits_np = np.zeros(1, dtype=np.int32)
        # The arms of the drafts that the current step verifies, and of those that were made last.
        self._verified = self._drafted = Arm.TREE
        # Accepted tokens expected of the current step, and its ms by the profile, 0 with prompts.
        self._expected = self._predicted_ms = 0.0
        # With exact timing, log rho on the host: on a CPU the trees' own, else a copy of them, and
        # the event of its arrival.
        self._host_scores = self.trees.log_rho
        self._arrived: torch.cuda.Event | None = None
        if not lagged and self.trees.budget is None and current_host().runs_ahead:
            self._host_scores = torch.empty_like(self.trees.log_rho, device="cpu", pin_memory=True)
            self._arrived = torch.cuda.Event()
        if lagged:
            self._earlier = EarlierScores(self.trees)
            # By slot: most nodes, and rows that are not nodes.
            self._layout_np = np.zeros((2, num_slots), dtype=np.int32)
            self._layout = torch.zeros(2, num_slots, dtype=torch.int32, device=self.trees.device)
            self._scratch = torch.zeros(num_slots + 1, dtype=torch.int32, device=self.trees.device)
            limits, rest = self._layout
            self._take_best = take_best.bind(
                log_rho=self.trees.log_rho,
                limits=limits,
                rest=rest,
                rows_start=query_start_loc,
                scratch=self._scratch,
            )

    # ---- vLLM's profile -----------------------------------------------------------------

    def batches_to_profile(self, capture_sizes: list[int]) -> Iterator[dict[str, int]]:
        """No batches where vLLM captures graphs: `engine.profile` times steps after the warm-up."""
        return iter(())

    def set_initial_cost_curves(self, samples: list[Any]) -> None:
        """Nothing, see `batches_to_profile`."""

    # ---- the calls of a step, in order --------------------------------------------------

    def add_request(self, req_idx: int) -> None:
        """A new request, or a preempted one that resumes, takes the slot."""
        self._has_tree[req_idx] = False
        if self.lagged:
            self._earlier.forget(req_idx)

    def get_num_tokens(self, num_tokens_per_req: dict[str, int], draft_tokens: Any) -> int:
        """All rows: vLLM asks before it has the batch in arrays, see `decide`."""
        return sum(num_tokens_per_req.values())

    def decide(self, batch: BatchReqState) -> int:
        """Decide N* of every request. Returns the step's rows, by which vLLM picks the graph."""
        drafts, slots = batch.num_draft_tokens_np, batch.idx_mapping_np
        assert drafts is not None
        self._verified, self._req_ids, self._slots = self._drafted, batch.req_ids, slots
        self._plain_rows = batch.num_scheduled_tokens - drafts
        limits = np.minimum(drafts, self.trees.node_limits_host[slots]) * self._has_tree[slots]
        self._limits = np.minimum(limits, self.trees.tree_size).astype(np.int32)
        self._num_rows = rows = int(self._plain_rows.sum())
        most = self.max_total_logits - len(slots) * self.num_bonus_tokens
        most = max(0, min(most, self.max_rows - rows))
        if self.trees.budget is not None:
            wanted = np.minimum(self._limits, self.trees.budget).astype(np.int32)
            self._num_verify = in_order(most, wanted)
        elif width := int(self._limits.max()):
            self._num_verify = self._choose(most, width)
        else:
            self._num_verify = self._limits
        self._num_nodes = int(self._num_verify.sum())
        if self._num_nodes == 0:
            self._limits = self._num_verify
        return self._num_nodes + rows

    def _choose(self, most: int, width: int) -> np.ndarray:
        """N* of every request, [R] int32. Lagged, only the sum counts: the device shares it out.

        width: the most nodes of a request.
        """
        scores = self._path_scores(self._slots, width)
        scores[self._columns[:width] >= self._limits[:, None]] = -1.0
        ranked = scores.flatten()
        ranked.sort()
        ranked = ranked[::-1][: min(int(self._limits.sum()), most)]
        predicted, emitting = self._step_ms(len(ranked)), len(self._slots)
        costs = corrected(predicted, self.runtime.plan.line)
        expected = np.empty(1 + len(ranked))
        expected[0] = emitting
        expected[1:] = emitting + ranked.cumsum()
        total = int((expected[: len(costs)] / costs).argmax())
        self._expected = float(expected[total]) - emitting
        if self._timed is not None:
            self._timed = (self._timed[0] + total, *self._timed[1:])
        elif self._num_rows == emitting:
            self._predicted_ms = float(predicted[total])
        if self.lagged:
            return in_order(total, self._limits)
        # The `total` best nodes; ties go to the first requests.
        chosen = np.argsort(-scores, axis=None, kind="stable")[:total]
        counts = np.bincount(chosen // width, minlength=emitting)
        return counts.astype(np.int32)

    def _path_scores(self, slots: np.ndarray, width: int) -> np.ndarray:
        """[R, width] float64 rho of the batch's trees, as far as the host may know them."""
        if self.lagged:
            return self._earlier.of(slots, width)
        if self._arrived is not None:
            with gpu_sync_allowed():
                self._arrived.synchronize()
        log_rho: np.ndarray = self._host_scores.numpy()[slots, :width]
        return np.exp(log_rho.astype(np.float64))

    def _step_ms(self, nodes: int) -> np.ndarray:
        """[nodes + 1] ms of the step with 0, 1, ... nodes, as it was profiled.

        Prompt tokens are computed in any case, so their time does not influence N*.
        """
        assert self.cost_tables is not None
        draft_ms, verify_ms = self.cost_tables
        reqs, rows, plan = len(self._slots), self._num_rows, self.runtime.plan
        if self.estimator is not None:
            context = float(self.req_states.num_computed_tokens_np[self._slots].mean())
            if plan.step_ms is not None and self._timed is not None:
                drafted = plan.verified == Arm.TREE
                draft = draft_ms[min(reqs, len(draft_ms) - 1)] if drafted else 0.0
                self.estimator.observe(*self._timed, plan.step_ms - draft)
            self._timed = rows, reqs, context
            verify_ms = self.estimator.verify_ms(reqs, context)
        added = verify_ms[rows : rows + nodes + 1] - verify_ms[min(rows, len(verify_ms) - 1)]
        base = float(verify_ms[min(reqs, len(verify_ms) - 1)])
        if plan.verified == Arm.TREE:
            base += float(draft_ms[min(reqs, len(draft_ms) - 1)])
        predicted: np.ndarray = base + added
        return predicted

    def compact_batch(
        self,
        num_draft_tokens_per_req: np.ndarray,
        num_scheduled_tokens: np.ndarray,
        cu_num_logits_np: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Rows of each request, [R], and the first logits row of each, [R + 1]."""
        num_rows, num_logits = self.layout
        self._num_logits_np = np.zeros(1 + len(num_logits), dtype=np.int32)
        num_logits.cumsum(out=self._num_logits_np[1:])
        return num_rows, self._num_logits_np

    def reallocate_drafts(self, req_ids: list[str], idx_mapping: torch.Tensor) -> tuple[Any, ...]:
        """Lay the step out on the device. Returns what this version of vLLM unpacks."""
        total, limits = self._num_nodes, self._limits
        if not self.lagged or total in (0, limits.sum()) or np.count_nonzero(limits) == 1:
            # The host's counts are exact, so the runner has already written query_start_loc.
            cu_num_logits = async_tensor_h2d(self._num_logits_np, device=self.trees.device)
        else:
            layout = np.array((limits, self._plain_rows))
            if (self._layout_np[:, self._slots] != layout).any():
                self._layout_np[:, self._slots] = layout
                async_tensor_h2d(self._layout_np, out=self._layout)
            # Allocated in each step, as vLLM's is: the copy to the host may outlive the step.
            cu_num_logits = self._scratch.new_empty(len(req_ids) + 1)
            self._take_best(idx_mapping, total, cu_num_logits)
            # Copied on the step's own stream, so that it arrives before the step's output.
            self._num_logits_np = async_copy_to_np(cu_num_logits)
        values = (cu_num_logits, self.query_start_loc, total)
        # The fourth is for sharded sampling, which is refused here.
        return (*values, None) if capabilities().returns_admitted_drafts else values

    def record_confidences(self, confidence_probs: torch.Tensor, input_batch: InputBatch) -> None:
        """Called after ``propose``, at the end of a step: its trees are those of the next one."""
        slots, arm = input_batch.idx_mapping_np, self.runtime.step.arm
        grows = arm != Arm.PLAIN
        self._has_tree[slots] = grows
        self._drafted = arm
        if self.lagged:
            self._earlier.copy(slots if grows else slots[:0])
        elif self._arrived is not None and grows:
            self._host_scores.copy_(self.trees.log_rho, non_blocking=True)
            self._arrived.record()

    # ---- the step's data for other adapters --------------------------------------------

    @property
    def layout(self) -> tuple[np.ndarray, np.ndarray]:
        """[R] rows and logits of each request, as the host trimmed the step."""
        return self._num_verify + self._plain_rows, self._num_verify + self.num_bonus_tokens

    @property
    def drafts(self) -> np.ndarray:
        """[R] int32, the most nodes that the device may give each request of the step."""
        return self._limits if self.lagged else self._num_verify

    def counted(self, output: Any) -> Any:
        """The output of the step launched last, with counts of its nodes if it had draft slots."""
        if not self._req_ids or not isinstance(output, AsyncModelRunnerOutput):
            return output
        req_ids, self._req_ids = self._req_ids, []
        sources, self.runtime.sources = self.runtime.sources, None
        numbers = self._expected, self._verified, self._predicted_ms
        self._expected = self._predicted_ms = 0.0
        return CountedOutput(output, req_ids, self._num_logits_np, sources, *numbers)

    def warm_up(self) -> None:
        """Compile the op that chooses the nodes."""
        if self.lagged:
            self._take_best(self.trees.step_slots[:1], 0, self._scratch.new_empty(2))


def in_order(total: int, limits: np.ndarray) -> np.ndarray:
    """Share `total` out to the first requests, each up to its limit.

    limits: [R] int32. Returns [R] int32.
    """
    left = np.maximum(total - (limits.cumsum() - limits), 0)
    return np.minimum(left, limits).astype(np.int32)
