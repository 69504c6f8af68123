# SPDX-License-Identifier: Apache-2.0
"""How many of the scheduled placeholders are verified: N* of every request, every step.

vLLM's scheduler schedules ``1 + num_speculative_tokens`` tokens a decoding request and knows
nothing of trees. ``AdaptiveVerificationManager`` is vLLM's own seam for verifying fewer; this one
cuts every request to its share of the budget.

Only this file and ``verification_lagged`` decide how many nodes are verified. Which nodes they are
was decided when the tree was built: its first ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import numpy as np
import torch
from vllm.utils.gpu_sync_debug import gpu_sync_allowed
from vllm.v1.worker.gpu.async_utils import StepTimingSample
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import sort_batch_req_ids
from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager
from vllm.v1.worker.gpu.states import RequestState

from vllm_bastion.step.host import copy_to_device
from vllm_bastion.step.runtime import Runtime
from vllm_bastion.step.shares import even_split

# vLLM 0.33 unpacks a fourth value: drafts per request, on their way to the host where only the
# device knows them and sampling is sharded over ranks (refused here), else None.
_NUM_REALLOCATED = len(
    get_args(get_type_hints(AdaptiveVerificationManager.reallocate_drafts)["return"])
)


class BastionVerificationManager(AdaptiveVerificationManager):
    """Exact: N* follows from the scores of the very trees it cuts; the host waits for them.

    Built by the hook on ``maybe_create_adaptive_verification_manager``. The base class's buffers
    for per-position confidences are not used, so its constructor is not run: at N = 512 they would
    be the largest allocation of the plugin.
    """

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
        self._cu_num_logits = torch.zeros_like(query_start_loc)
        # Slots whose draft tokens are placeholders: no tree was grown for them yet.
        self._treeless: set[int] = set()
        # Of the step at hand, in batch order: most nodes a request may have, nodes it gets, and
        # its rows that are no draft nodes.
        self._drafts = np.zeros(0, dtype=np.int32)
        self._kept = np.zeros(0, dtype=np.int32)
        self._rest = np.zeros(0, dtype=np.int32)
        self._req_ids: list[str] = []

    # ---- the calls of a step, in order --------------------------------------------------

    def add_request(self, req_idx: int) -> None:
        self._treeless.add(req_idx)
        if self.runtime.switch is not None:
            self.runtime.switch.add_request(req_idx)

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
        return int(self._kept.sum() + self._rest.sum())

    def _choose(self, slots: np.ndarray, drafts: np.ndarray) -> np.ndarray:
        """N* of every row, [R] int32, at most `drafts`."""
        trees = self.trees
        base_rows = int(self._rest.sum())
        if trees.budget is None and base_rows != len(slots) and drafts.any():
            # The device priced a batch of decodes. Prompt rows share this step and its cost, so
            # the same rule is asked again with them counted in.
            trees.choose_again(slots, drafts, base_rows)
        chosen, promised = trees.decision(slots)
        kept = np.minimum(chosen, drafts).astype(np.int32)
        room = self._room(len(slots))
        if kept.sum() > room:
            kept = even_split(room, kept)
        if self.runtime.switch is not None:
            # A request near its end, or in a crowd, has fewer placeholders than it would use.
            part = promised * kept / np.maximum(chosen, 1)
            self.runtime.switch.verifying(slots, drafts > 0, kept, part)
        return kept

    def _room(self, num_reqs: int) -> int:
        """Nodes whose logits vLLM has memory for in one step."""
        return max(0, self.max_total_logits - num_reqs * self.num_bonus_tokens)

    def compact_batch(
        self,
        num_draft_tokens_per_req: np.ndarray,
        num_scheduled_tokens: np.ndarray,
        cu_num_logits_np: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        self._cu_num_logits_np = np.zeros_like(cu_num_logits_np)
        np.cumsum(self._kept + self.num_bonus_tokens, out=self._cu_num_logits_np[1:])
        return self._kept + self._rest, self._cu_num_logits_np

    def reallocate_drafts(self, req_ids: list[str], idx_mapping: torch.Tensor) -> tuple[Any, ...]:
        # The CPU counts were exact, so the runner has already filled query_start_loc rightly.
        cu_num_logits = copy_to_device(
            self._cu_num_logits_np, self._cu_num_logits[: len(req_ids) + 1]
        )
        return self._reallocated(cu_num_logits, int(self._kept.sum()))

    def _reallocated(self, cu_num_logits: torch.Tensor, num_drafts: int) -> tuple[Any, ...]:
        """As many values as this vLLM unpacks."""
        return (cu_num_logits, self.query_start_loc, num_drafts, None)[:_NUM_REALLOCATED]

    def record_confidences(self, confidence_probs: torch.Tensor, input_batch: InputBatch) -> None:
        """Called after ``propose``: the batch's requests have trees from here on, or none."""
        slots = input_batch.idx_mapping_np.tolist()
        if self.runtime.drafted:
            self._treeless.difference_update(slots)
        else:
            self._treeless.update(slots)

    # ---- what others ask about the step -------------------------------------------------

    @property
    def drafts(self) -> np.ndarray:
        """[R] int32, most nodes each row of the step may have on the device."""
        return self._kept

    def take_num_verified(self) -> dict[str, int]:
        """Nodes verified of each request of the last step, for the metrics; clears it."""
        verified = dict(zip(self._req_ids, self._kept.tolist(), strict=True))
        self._req_ids, self._kept = [], self._kept[:0]
        return verified

    def warm_up(self) -> None:
        """Compile what the first mixed step would wait for."""
        if self.trees.budget is None:
            self.trees.choose_again(np.zeros(1, np.int64), np.zeros(1, np.int32), 1)

    # ---- vLLM's own profiling -----------------------------------------------------------

    def batches_to_profile(self, capture_sizes: list[int]) -> Iterator[dict[str, int]]:
        """None here: `vllm_bastion.cost.measure` measures, with graphs and without."""
        return iter(())

    def set_initial_cost_curves(self, samples: list[StepTimingSample]) -> None:
        """See `batches_to_profile`."""
